"""The proxy's own sockets: HandlerRegistry, Inspect, and what the Runtime API does not serve."""

import asyncio
import datetime
import os
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from crust.core import volumes
from crust.handoff import claims, layout
from crust.rpc import channel
from crust.wire.v1 import handlers_pb2, handlers_pb2_grpc, inspect_pb2, runtime_pb2, types_pb2
from tests.support.co import capability
from tests.support.faults.refusals import refused
from tests.support.nodes.node import Node

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
        ({"filesystems": ["ext4"] * 65}, "65 filesystems, and 64 is the most"),
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


async def test_operators_see_drivers_handlers_and_volumes(kata: Node, published: str) -> None:
    drivers = await kata.inspect.ListDrivers(inspect_pb2.ListDriversRequest(), timeout=10)
    assert [(each.name, each.connected, each.deferred_volumes) for each in drivers.drivers] == [
        ("csi.example.com", True, 1)
    ]
    handlers = await kata.inspect.ListHandlers(inspect_pb2.ListHandlersRequest(), timeout=10)
    assert [each.registration.name for each in handlers.handlers] == ["kata"]
    request = inspect_pb2.ListDeferredVolumesRequest()
    (volume,) = (await kata.inspect.ListDeferredVolumes(request, timeout=10)).volumes
    assert (volume.volume_id, volume.state, volume.sandbox_id) == ("vol-1", "published", "")
    with kata.sandbox(published, name="box-7"):
        (volume,) = (await kata.inspect.ListDeferredVolumes(request, timeout=10)).volumes
        assert (volume.state, volume.sandbox_id) == ("mounted", "box-7")


async def test_error_of_the_last_claim_stays_visible(kata: Node, published: str) -> None:
    """When an operator looks at a pod that does not start, its sandbox has ended already."""
    parsed = volumes.TargetPath.parse(published)
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


async def test_claim_that_a_killed_sandbox_left_is_called_so(kata: Node, published: str) -> None:
    with kata.sandbox(published, name="box-7"):
        claim = Path(layout.Layout(kata.places.volumes).entry(volumes.TargetPath(published)).claim)
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


async def test_watch_reports_the_events_of_a_volume(kata: Node, target: str) -> None:
    watch: Any = kata.inspect.Watch(inspect_pb2.WatchRequest(), timeout=30)
    await watch.initial_metadata()  # the watch has begun
    await kata.co.publish("vol-1", target)
    assert (await _next(watch, "published")).target_path == target
    with kata.sandbox(target, name="box-7"):
        assert "box-7" in (await _next(watch, "claimed")).message
    await _next(watch, "released")
    await kata.co.unpublish("vol-1", target)
    assert (await _next(watch, "unpublished")).handler == "kata"
    given = capability("btrfs")
    await refused(kata.co.publish("vol-1", target, given), Code.FAILED_PRECONDITION)
    assert "btrfs" in (await _next(watch, "refused")).message
    watch.cancel()


async def _next(watch: Any, kind: str) -> inspect_pb2.Event:
    """The next event of a kind; a claim causes two events, taken and mounted."""
    async with asyncio.timeout(60):
        while True:
            event: inspect_pb2.Event = await watch.read()
            if event.kind == kind:
                return event


@pytest.mark.parametrize("method", ["RuntimeStageVolume", "RuntimeUnstageVolume"])
async def test_staging_of_the_kep_is_unimplemented(kata: Node, published: str, method: str) -> None:
    request = getattr(runtime_pb2, f"{method}Request")(volume_target_path=published)
    await refused(
        getattr(kata.runtime, method)(request, timeout=10),
        Code.UNIMPLEMENTED,
        method,
        "not served",
    )
    kata.check_published("vol-1", published)
