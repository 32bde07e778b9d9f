"""The service Runtime: statistics and expansion, through CO, proxy and shim; and whether a device is unused."""

import asyncio
import contextlib
import os

import grpc
import grpc.aio
import pytest

from crust.core import errors, volumes
from crust.core.volumes import HandlerFeature
from crust.csi_shim import shim_process
from crust.proxy import handler_calls
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2
from crust.wire.v1 import runtime_pb2, types_pb2
from tests.support.co import Co
from tests.support.drivers import fake_driver
from tests.support.drivers.fake_driver import MIB, Failure
from tests.support.faults.refusals import refused, refused_in_time, until
from tests.support.nodes.fake_node import FakeNode
from tests.support.runtimes import fake_handler
from tests.support.runtimes.fake_handler import USAGE, FakeHandler

Code = grpc.StatusCode


@pytest.mark.spec("D-25")
async def test_statistics_come_from_the_handler_with_the_condition(
    node: FakeNode, target: str
) -> None:
    condition = volumes.VolumeCondition(abnormal=True, message="read-only")
    async with node.in_sandbox(
        target, fake=FakeHandler(usage=volumes.VolumeStats(USAGE, condition))
    ):
        answer = await node.co.stats("vol-1", target)
        assert not (await _stats_of_csi_1_13(node, target)).HasField("volume_condition")
    first = answer.usage[0]
    assert (first.unit, first.total, first.used, first.available) == (1, 1000, 400, 500)
    assert answer.volume_condition.message == "read-only"
    assert node.driver.called("NodeGetVolumeStats") == []


async def _stats_of_csi_1_13(node: FakeNode, target: str) -> csi_pb2.NodeGetVolumeStatsResponse:
    """By another shim, whose caller speaks CSI 1.13, where statistics have no condition."""
    other = {"socket": f"{node.places.root}/1.13.sock", "csi_profile": "1.13"}
    settings = node.shim_settings().model_copy(update=other)
    async with shim_process.serving(settings), channel.connect(settings.socket) as caller:
        answer = await Co(caller).stats("vol-1", target, defer_fs_ops=True)
    assert answer.usage
    return answer


async def test_statistics_without_a_sandbox_say_so(kata: FakeNode, published: str) -> None:
    await refused(
        kata.co.stats("vol-1", published),
        Code.FAILED_PRECONDITION,
        "no sandbox has it",
        "start the pod",
    )


async def test_statistics_of_silent_guest_are_unavailable_in_time(
    node: FakeNode, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler_calls, "STATS_TIMEOUT_S", 0.05)
    async with node.gated_handler(target) as (_, gate):
        with node.sandbox(target):
            await refused(
                node.co.stats("vol-1", target), Code.UNAVAILABLE, "'kata'", "did not answer"
            )
            gate.opened.set()


async def test_error_of_the_handler_arrives_unchanged(node: FakeNode, target: str) -> None:
    async with node.in_sandbox(
        target,
        fake=FakeHandler(error=errors.RuntimeFailed("the guest", why="it hangs", hint="look")),
    ):
        await refused(node.co.stats("vol-1", target), Code.INTERNAL, "the guest: it hangs; look")


@pytest.mark.parametrize(
    "line",
    [(10, 11, 0), (10, 0, 11), (-1, -1, -1), (2**62, 0, 2**62)],
    ids=["used", "available", "negative", "above the device"],
)
async def test_impossible_statistics_are_refused(
    node: FakeNode, target: str, line: tuple[int, int, int]
) -> None:
    usage = volumes.VolumeUsage(volumes.UsageUnit.BYTES, *line)
    async with node.in_sandbox(target, FakeHandler(usage=volumes.VolumeStats((usage,)))):
        await refused(node.co.stats("vol-1", target), Code.INTERNAL, "impossible", "hostile")


@pytest.mark.spec("D-30")
async def test_call_without_registered_handler_is_unavailable(node: FakeNode, target: str) -> None:
    async with node.handler() as session:
        await node.co.publish("vol-1", target)
    await until(session.lost)
    with node.sandbox(target):
        await refused(node.co.stats("vol-1", target), Code.UNAVAILABLE, "'kata'", "not affected")
        for call in (
            node.co.expand("vol-1", target, 1),
            node.freeze(target),
            node.thaw(target),
            node.limit(target, volumes.IoLimits()),
        ):
            await refused(call, Code.UNAVAILABLE, "'kata'")


@pytest.mark.parametrize("call", ["stats", "expand"])
async def test_handler_whose_session_ends_during_a_call_is_unavailable(
    node: FakeNode, target: str, call: str
) -> None:
    """The caller gets the error at once. grpc.aio by itself would let it wait until its deadline."""
    async with node.gated_handler(target) as (_, gate):
        with node.sandbox(target):
            asked = asyncio.create_task(
                node.co.stats("vol-1", target)
                if call == "stats"
                else node.co.expand("vol-1", target, 1)
            )
            await until(gate.entered)
            await _end_session(node)
            await refused(asked, Code.UNAVAILABLE, "'kata'", "during the call")
            gate.opened.set()
    assert node.record(target).mount.capacity_bytes == 64 * MIB


async def _end_session(node: FakeNode) -> None:
    """End the handler's session as its death would: for the proxy the stream ends."""
    registrations = [
        task for task in asyncio.all_tasks() if "registration of kata" in task.get_name()
    ]
    assert len(registrations) == 1
    registrations[0].cancel()
    await asyncio.wait(registrations)


@pytest.mark.spec("D-7", "D-26")
async def test_expand_grows_device_then_filesystem_then_record(node: FakeNode, target: str) -> None:
    async with node.deferred(target) as fake:
        node.devices.sizes_bytes[fake_driver.device_of("vol-1")] = 128 * MIB
        with node.sandbox(target):
            answer = await node.co.expand("vol-1", target, 128 * MIB, limit=200 * MIB)
            await node.co.expand("vol-1", target, 1)
    assert answer.capacity_bytes == 128 * MIB
    for method, count in (("NodePublishVolume", 1), ("NodeExpandVolume", 2)):
        calls = node.driver.called(method)
        assert [call.request.defer_fs_ops for call in calls] == [True] * count
        assert all(("crust-extensions", "deferral") in call.metadata for call in calls)
    limits = [(target, volumes.CapacityRange(128 * MIB, limit * MIB)) for limit in (200, 0)]
    assert fake.expansions == limits, "the second one fills the device, which the driver has grown"
    assert node.record(target).mount.capacity_bytes == 128 * MIB


@pytest.mark.spec("D-26")
async def test_expand_without_a_sandbox_is_kept_for_the_next(node: FakeNode, target: str) -> None:
    async with node.deferred(target) as fake:
        node.devices.sizes_bytes[fake_driver.device_of("vol-1")] = 128 * MIB
        await node.co.expand("vol-1", target, 128 * MIB)
        assert fake.expansions == []
        await node.co.publish("vol-1", target)  # a retry after the growth changes nothing
    assert node.record(target).mount.capacity_bytes == 128 * MIB


async def test_expand_by_the_staging_path_reaches_the_sandbox_too(
    node: FakeNode, target: str
) -> None:
    async with node.in_sandbox(target) as fake:
        await node.co.expand("vol-1", f"{node.places.kubelet}/staging", 64 * MIB)
    assert [expansion[0] for expansion in fake.expansions] == [target]


@pytest.mark.spec("D-27")
async def test_expand_beyond_the_limit_is_out_of_range(node: FakeNode, target: str) -> None:
    async with node.in_sandbox(target) as fake:
        await refused(
            node.co.expand("vol-1", target, 20 * MIB, limit=10 * MIB),
            Code.OUT_OF_RANGE,
            "above limit_bytes",
            "raise the limit",
        )
        assert node.driver.called("NodeExpandVolume") == []
        await refused(
            node.co.expand("vol-1", target, 1, limit=10 * MIB), Code.OUT_OF_RANGE, "raise"
        )
        await refused(node.co.expand("vol-1", target, -1), Code.INVALID_ARGUMENT, "negative")
        node.driver.failures["NodeExpandVolume"] = Failure(Code.OUT_OF_RANGE, "too large")
        await refused(node.co.expand("vol-1", target, 1), Code.OUT_OF_RANGE, "too large")
    assert fake.expansions == []


async def test_expand_of_a_device_that_did_not_grow_is_refused(
    kata: FakeNode, published: str
) -> None:
    for required in (999 * MIB, 1):  # the second is as large as the driver says it has grown it
        expand = kata.co.expand("vol-1", published, required)
        words = ("the device has 67108864 bytes", "has answered OK to both has not done it")
        await refused(expand, Code.UNAVAILABLE, *words)


@pytest.mark.spec("D-37")
async def test_expand_under_a_sandbox_that_boots_is_not_final(node: FakeNode, target: str) -> None:
    """FAILED_PRECONDITION would be final: a kubelet would not try again before the pod is restarted."""
    async with node.in_sandbox(
        target,
        fake=FakeHandler(error=errors.NotReady("it is not mounted yet", why="the sandbox boots")),
    ):
        await refused(node.co.expand("vol-1", target, 1), Code.UNAVAILABLE, "boots")


@pytest.mark.spec("D-37")
async def test_expand_that_needs_a_restart_of_the_pod_says_so(node: FakeNode, target: str) -> None:
    async with node.deferred(
        target, features=frozenset({HandlerFeature.STATS, HandlerFeature.GROW})
    ):
        node.devices.sizes_bytes[fake_driver.device_of("vol-1")] = 128 * MIB
        with node.sandbox(target):
            await refused(
                node.co.expand("vol-1", target, 128 * MIB),
                Code.FAILED_PRECONDITION,
                "ONLINE_EXPAND",
                "restart the pod",
            )
    assert node.record(target).mount.capacity_bytes == 128 * MIB, "the next sandbox grows it"


async def test_expansion_outlives_its_caller_and_is_recorded(node: FakeNode, target: str) -> None:
    async with node.gated_handler(target) as (fake, gate):
        node.devices.sizes_bytes[fake_driver.device_of("vol-1")] = 128 * MIB
        request = runtime_pb2.RuntimeExpandVolumeRequest(
            volume_target_path=target,
            capacity_range=types_pb2.CapacityRange(required_bytes=128 * MIB),
        )
        with node.sandbox(target):
            await refused_in_time(
                lambda: node.runtime.RuntimeExpandVolume(request, timeout=0.5),
                Code.ABORTED,
                "has not ended",
                "retry",
            )
            gate.opened.set()
            await node.runtime.RuntimeExpandVolume(request, timeout=10)
    assert set(fake.expansions) == {(target, volumes.CapacityRange(128 * MIB))}
    assert node.record(target).mount.capacity_bytes == 128 * MIB


@pytest.mark.parametrize("reported", [0, -5, 65 * MIB])
@pytest.mark.spec("D-27")
async def test_size_beyond_the_device_is_refused(
    node: FakeNode, target: str, reported: int
) -> None:
    async with node.in_sandbox(target, FakeHandler(filled_bytes=reported)):
        await refused(node.co.expand("vol-1", target, 1), Code.INTERNAL, str(reported), "hostile")


async def test_statistics_of_wrong_or_no_volume_are_refused(kata: FakeNode, published: str) -> None:
    for call in (kata.co.stats("vol-2", published), kata.co.expand("vol-2", published, 1)):
        await refused(call, Code.NOT_FOUND, "vol-2", "vol-1")
    flagged = kata.co.stats("vol-3", "/nowhere", defer_fs_ops=True)
    await refused(flagged, Code.NOT_FOUND, "no deferred volume", "/nowhere")


async def test_calls_of_ordinary_volume_are_the_drivers(kata: FakeNode, target: str) -> None:
    await kata.co.publish("vol-1", target, defer=False)
    answer = await kata.co.stats("vol-1", target)
    assert answer.usage[0].total == 7
    assert (await kata.co.expand("vol-1", target, 5 * MIB)).capacity_bytes == 64 * MIB


@pytest.mark.spec("D-26")
async def test_expand_without_grow_needs_filesystem_that_fills_device(
    node: FakeNode, target: str
) -> None:
    device = fake_driver.device_of("vol-1")
    node.filesystems.sizes_bytes[device] = 64 * MIB
    async with node.handler(features=fake_handler.ALL_FEATURES - {HandlerFeature.GROW}):
        await node.co.publish("vol-1", target)
        node.devices.sizes_bytes[device] = 128 * MIB
        for sandbox in (contextlib.nullcontext(), node.sandbox(target)):
            with sandbox:
                await refused(
                    node.co.expand("vol-1", target, 128 * MIB),
                    Code.FAILED_PRECONDITION,
                    "[FilesystemNotGrown]",
                    "does not offer GROW",
                )
        node.filesystems.sizes_bytes[device] = 128 * MIB
        grown = await node.co.expand("vol-1", target, 128 * MIB)
    assert grown.capacity_bytes == 128 * MIB


@pytest.mark.parametrize("method", ["RuntimeStageVolume", "RuntimeUnstageVolume"])
async def test_staging_of_the_kep_is_unimplemented(
    kata: FakeNode, published: str, method: str
) -> None:
    request = getattr(runtime_pb2, f"{method}Request")(volume_target_path=published)
    await refused(
        getattr(kata.runtime, method)(request, timeout=10), Code.UNIMPLEMENTED, method, "not served"
    )
    kata.check_published("vol-1", published)


REQUEST = runtime_pb2.RuntimeCheckDeviceUnusedRequest(major=7, minor=3)


async def test_device_is_unused_until_a_process_writes_to_it(node: FakeNode) -> None:
    await node.runtime.RuntimeCheckDeviceUnused(
        REQUEST, timeout=10
    )  # the kernel has no such device
    device = volumes.BlockSource("/dev/loop3", volumes.DeviceIdentity(7, 3, 12))
    node.devices.numbers[os.makedev(7, 3)] = device
    await node.runtime.RuntimeCheckDeviceUnused(REQUEST, timeout=10)
    node.targets.written.add("/dev/loop3")
    call = node.runtime.RuntimeCheckDeviceUnused(REQUEST, timeout=10)
    await refused(call, Code.FAILED_PRECONDITION, "DeviceInUse", "qemu[1000]")
