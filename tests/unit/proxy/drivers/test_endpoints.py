"""The proxy's own sockets: HandlerRegistry, the Runtime API's staging, Inspect."""

import asyncio
import datetime
import os
import threading
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from crust import volumes
from crust.handoff import claims, layout
from crust.rpc import channel
from crust.wire.v1 import handlers_pb2, handlers_pb2_grpc, inspect_pb2, runtime_pb2, types_pb2
from tests.support.faults.refusals import refused
from tests.support.nodes import node as nodes
from tests.support.nodes.fake_targets import FakeDevices
from tests.support.nodes.node import Node, Places

Code = grpc.StatusCode
REQUEST: dict[str, Any] = {
    "name": "kata",
    "version": "1",
    "endpoint": "/run/kata.sock",
    "volume_types": [types_pb2.VolumeType.BLOCK],
    "filesystems": ["ext4"],
}


async def _register(node: Node, **changes: Any) -> None:
    """Register with a request that differs from a valid one, and read the first response."""
    async with channel.connect(node.places.sockets.handlers) as connected:
        stub: Any = handlers_pb2_grpc.HandlerRegistryStub(connected)
        call = stub.Register(handlers_pb2.RegisterRequest(**{**REQUEST, **changes}), timeout=10)
        answer = await call.read()
        if answer is grpc.aio.EOF:
            raise AssertionError("the stream ended")
        call.cancel()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": ""}, "name"),
        ({"name": "Kata"}, "'Kata'"),
        ({"name": "k" * 64}, "name"),
        ({"name": "kata\n"}, "name"),
        ({"endpoint": "relative.sock"}, "not absolute"),
        ({"endpoint": "/" + "e" * 107}, "107"),
        ({"volume_types": []}, "BLOCK"),
        ({"filesystems": []}, "filesystems is empty"),
        ({"filesystems": ["ext4", "../x"]}, "'../x'"),
    ],
)
async def test_malformed_registration_is_refused(
    node: Node, changes: dict[str, Any], words: str
) -> None:
    await refused(_register(node, **changes), Code.INVALID_ARGUMENT, "registered", words)
    answer = await node.inspect.ListHandlers(inspect_pb2.ListHandlersRequest(), timeout=10)
    assert list(answer.handlers) == []


async def test_unknown_features_are_ignored(node: Node) -> None:
    await _register(node, features=[1, 99])


async def test_name_of_a_registered_handler_is_taken(kata: Node) -> None:
    await refused(
        _register(kata), Code.ALREADY_EXISTS, "'kata'", kata.places.handler, "another name"
    )


async def test_operators_see_drivers_handlers_and_volumes_with_their_sandbox(kata: Node) -> None:
    target = kata.places.target("one")
    await kata.co.publish("vol-1", target)
    drivers = await kata.inspect.ListDrivers(inspect_pb2.ListDriversRequest(), timeout=10)
    assert [(each.name, each.connected, each.deferred_volumes) for each in drivers.drivers] == [
        ("csi.example.com", True, 1)
    ]
    handlers = await kata.inspect.ListHandlers(inspect_pb2.ListHandlersRequest(), timeout=10)
    assert [each.registration.name for each in handlers.handlers] == ["kata"]
    request = inspect_pb2.ListDeferredVolumesRequest()
    (volume,) = (await kata.inspect.ListDeferredVolumes(request, timeout=10)).volumes
    assert (volume.volume_id, volume.state, volume.sandbox_id) == ("vol-1", "published", "")
    with kata.sandbox(target, name="box-7"):
        (volume,) = (await kata.inspect.ListDeferredVolumes(request, timeout=10)).volumes
        assert (volume.state, volume.sandbox_id) == ("mounted", "box-7")


async def test_error_of_the_last_claim_stays_visible(kata: Node) -> None:
    """When an operator looks at a pod that does not start, its sandbox has ended already."""
    target = kata.places.target("one")
    await kata.co.publish("vol-1", target)
    parsed = volumes.TargetPath.parse(target)
    paths = layout.Layout(kata.places.volumes).entry(parsed)
    with claims.ClaimLock.acquire(paths, parsed):
        claims.write(
            paths,
            claims.Claim(
                sandbox_id="box-7",
                handler="kata",
                state=claims.State.ERROR,
                error="the guest cannot mount it",
                pid=os.getpid(),
                claimed_at=datetime.datetime.now(datetime.UTC),
                live=True,
            ),
        )
    request = inspect_pb2.ListDeferredVolumesRequest()
    (volume,) = (await kata.inspect.ListDeferredVolumes(request, timeout=10)).volumes
    assert (volume.state, volume.sandbox_id) == ("published", "")
    assert volume.message == "the guest cannot mount it"


async def test_claim_that_a_killed_sandbox_left_is_called_so(kata: Node) -> None:
    target = kata.places.target("one")
    await kata.co.publish("vol-1", target)
    with kata.sandbox(target, name="box-7"):
        claim = Path(layout.Layout(kata.places.volumes).entry(volumes.TargetPath(target)).claim)
        left = claim.read_bytes()
    claim.write_bytes(left)
    request = inspect_pb2.ListDeferredVolumesRequest()
    (volume,) = (await kata.inspect.ListDeferredVolumes(request, timeout=10)).volumes
    assert (volume.state, volume.sandbox_id) == ("published", "")
    assert volume.message.startswith("sandbox box-7 ended and left its claim")


async def test_an_unreadable_entry_is_shown_with_its_reason(node: Node) -> None:
    os.mkdir(f"{node.places.volumes}/{'a' * 64}", 0o700)
    with open(f"{node.places.volumes}/{'a' * 64}/mountInfo.json", "w", encoding="ascii") as file:
        file.write("{}")
    request = inspect_pb2.ListDeferredVolumesRequest()
    (volume,) = (await node.inspect.ListDeferredVolumes(request, timeout=10)).volumes
    assert volume.state == "unreadable"
    assert "cannot be read" in volume.message


async def test_watch_reports_the_events_of_a_volume(kata: Node) -> None:
    watch: Any = kata.inspect.Watch(inspect_pb2.WatchRequest(), timeout=30)
    await watch.initial_metadata()  # the watch has begun
    target = kata.places.target("one")
    await kata.co.publish("vol-1", target)
    assert (await _next(watch, "published")).target_path == target
    with kata.sandbox(target, name="box-7"):
        assert "box-7" in (await _next(watch, "claimed")).message
    await _next(watch, "released")
    await kata.co.unpublish("vol-1", target)
    assert (await _next(watch, "unpublished")).handler == "kata"
    mount = {"fs_type": "btrfs"}
    await refused(kata.co.publish("vol-1", target, mount=mount), Code.FAILED_PRECONDITION)
    assert "btrfs" in (await _next(watch, "refused")).message
    watch.cancel()


async def _next(watch: Any, kind: str) -> inspect_pb2.Event:
    """The next event of a kind; a claim causes two events, taken and mounted."""
    async with asyncio.timeout(60):
        while True:
            event: inspect_pb2.Event = await watch.read()
            if event.kind == kind:
                return event


def stage_request(target: str, **changes: Any) -> runtime_pb2.RuntimeStageVolumeRequest:
    fields: dict[str, Any] = {
        "volume_type": types_pb2.VolumeType(type=types_pb2.VolumeType.BLOCK),
        "volume_target_path": target,
        "volume_backing_path": "/dev/kep0",
        "fs_type": "ext4",
        **changes,
    }
    return runtime_pb2.RuntimeStageVolumeRequest(**fields)


async def test_a_driver_of_the_kep_stages_and_unstages(kata: Node) -> None:
    target = kata.places.target("one")
    for _ in range(2):
        await kata.runtime.RuntimeStageVolume(
            stage_request(target, mount_flags=["ro"], volume_supplemental_group="7"), timeout=10
        )
    entry = kata.entry(target)
    assert entry is not None
    record = entry.require()
    assert (record.device, record.readonly, record.generation) == ("/dev/kep0", True, 1)
    request = runtime_pb2.RuntimeUnstageVolumeRequest(volume_target_path=target)
    with kata.sandbox(target, name="box-7"):
        await refused(
            kata.runtime.RuntimeUnstageVolume(request, timeout=10),
            Code.FAILED_PRECONDITION,
            "box-7",
        )
    for _ in range(2):
        await kata.runtime.RuntimeUnstageVolume(request, timeout=10)
    assert kata.entry(target) is None


class SlowDevices(FakeDevices):
    """Devices whose identification waits until a test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.answer = threading.Event(), threading.Event()

    def identify(self, path: str, /) -> volumes.DeviceIdentity:
        self.asked.set()
        assert self.answer.wait(20)
        return super().identify(path)


async def test_unstage_does_not_overtake_a_stage_whose_caller_gave_up(
    places: Places,
) -> None:
    devices, target = SlowDevices(), places.target("one")
    async with nodes.running(places, devices=devices) as node, node.handler():
        stage = asyncio.ensure_future(node.runtime.RuntimeStageVolume(stage_request(target)))
        assert await asyncio.to_thread(devices.asked.wait, 20)
        request = runtime_pb2.RuntimeUnstageVolumeRequest(volume_target_path=target)
        try:
            await refused(
                node.runtime.RuntimeUnstageVolume(request, timeout=10), Code.ABORTED, "retry"
            )
        finally:
            devices.answer.set()
        await stage
        await node.runtime.RuntimeUnstageVolume(request, timeout=10)
        assert node.entry(target) is None


async def test_repeated_stage_keeps_its_handler(kata: Node) -> None:
    target = kata.places.target("one")
    await kata.runtime.RuntimeStageVolume(stage_request(target), timeout=10)
    async with kata.handler(name="other", endpoint=f"{kata.places.root}/other.sock"):
        await kata.runtime.RuntimeStageVolume(stage_request(target), timeout=10)
        await refused(
            kata.runtime.RuntimeStageVolume(stage_request(kata.places.target("two")), timeout=10),
            Code.FAILED_PRECONDITION,
            "no runtime handler is named",
        )


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"volume_type": types_pb2.VolumeType()}, Code.INVALID_ARGUMENT, "only BLOCK"),
        ({"volume_target_path": "relative"}, Code.INVALID_ARGUMENT, "relative"),
        ({"volume_target_path": "/etc/x"}, Code.PERMISSION_DENIED, "below none of"),
        ({"volume_backing_path": "loop0"}, Code.INVALID_ARGUMENT, "volume_backing_path"),
        ({"volume_backing_path": "/nowhere"}, Code.NOT_FOUND, "/nowhere"),
        ({"fs_type": ""}, Code.INVALID_ARGUMENT, "fstype"),
        ({"fs_type": "btrfs"}, Code.FAILED_PRECONDITION, "'btrfs'"),
        ({"volume_supplemental_group": "0"}, Code.INVALID_ARGUMENT, "'0'"),
        ({"mount_flags": ["password=x"]}, Code.INVALID_ARGUMENT, "password"),
        (
            {
                "volume_supplemental_group_change_policy": types_pb2.VolumeGroupChangePolicy(
                    policy=types_pb2.VolumeGroupChangePolicy.ON_ROOT_MISMATCH
                )
            },
            Code.INVALID_ARGUMENT,
            "without",
        ),
    ],
)
async def test_invalid_stage_request_is_refused_and_leaves_nothing(
    kata: Node, changes: dict[str, Any], code: Code, words: str
) -> None:
    target = kata.places.target("one")
    request = stage_request(target, **changes)
    await refused(kata.runtime.RuntimeStageVolume(request, timeout=10), code, words)
    assert kata.places.entries() == []


async def test_runtime_unstage_cannot_unpublish_a_csi_publish(kata: Node) -> None:
    target = kata.places.target("one")
    await kata.co.publish("vol-1", target)
    request = runtime_pb2.RuntimeUnstageVolumeRequest(volume_target_path=target)
    await refused(
        kata.runtime.RuntimeUnstageVolume(request, timeout=10), Code.INVALID_ARGUMENT, "vol-1"
    )
    await refused(
        kata.runtime.RuntimeStageVolume(stage_request(target), timeout=10),
        Code.ALREADY_EXISTS,
        "published already",
    )
    kata.check_published("vol-1", target)
