"""The contract of a shim in front of a driver's socket; and a shim whose threads all hang on volumes."""

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from crust.core.settings.shim import ShimSettings
from crust.csi_shim import library, shim_process
from crust.csi_shim.wrap import leaves, node_shim, private_directories
from crust.csi_shim.wrap.node_shim import Wrapping
from crust.host.process import systemd, workers
from crust.host.process.workers import Workers
from crust.rpc import channel
from crust.rpc.messages import extensions
from crust.rpc.serving import worker_watch
from crust.rpc.serving.daemon import Daemon
from crust.rpc.serving.worker_watch import WorkerWatch
from crust.wire.csi.v1 import csi_pb2
from crust.wire.v1 import runtime_pb2, runtime_pb2_grpc, types_pb2
from tests.support.co import Co, capability, publish_request
from tests.support.drivers import fake_driver
from tests.support.drivers.fake_driver import MIB, Failure, FakeDriver
from tests.support.faults.refusals import refused, until_probe
from tests.support.nodes import node as nodes
from tests.support.nodes.node import Places
from tests.support.raised import raised

Code = grpc.StatusCode
CALLERS_S = 10
TARGET = "/var/lib/kubelet/pods/one/mount"


@dataclass
class FakeRuntime(runtime_pb2_grpc.RuntimeServicer):
    """The proxy's Runtime API, as the shim sees it."""

    failure: Failure | None = None
    condition: str = ""
    expansions: list[tuple[str, int, int]] = field(default_factory=list)

    async def RuntimeGetVolumeStats(self, request: Any, context: Any) -> Any:
        if self.failure is not None:
            await context.abort(self.failure.code, self.failure.details)
        unit = types_pb2.VolumeUsage.BYTES
        usage = types_pb2.VolumeUsage(unit=unit, total=1000, used=400, available=500)
        answer = runtime_pb2.RuntimeGetVolumeStatsResponse(usage=[usage])
        if self.condition:
            answer.volume_condition.message = self.condition
        return answer

    async def RuntimeExpandVolume(self, request: Any, context: Any) -> Any:
        if self.failure is not None:
            await context.abort(self.failure.code, self.failure.details)
        wanted = request.capacity_range
        self.expansions.append(
            (request.volume_target_path, wanted.required_bytes, wanted.limit_bytes)
        )
        return runtime_pb2.RuntimeExpandVolumeResponse(capacity_bytes=wanted.required_bytes)


@dataclass
class Shim:
    """A shim that serves, what it wraps, and a caller that knows deferral."""

    driver: FakeDriver
    runtime: FakeRuntime
    co: Co

    async def publish(self, **fields: Any) -> csi_pb2.NodePublishVolumeResponse:
        return await self.co.publish("vol-1", TARGET, **fields)

    async def stats(
        self, path: str = TARGET, *, flag: bool = True
    ) -> csi_pb2.NodeGetVolumeStatsResponse:
        return await self.co.stats("vol-1", path, defer_fs_ops=flag)

    async def expand(self, required: int, limit: int = 0) -> csi_pb2.NodeExpandVolumeResponse:
        return await self.co.expand("vol-1", TARGET, required, limit, defer_fs_ops=True)


@pytest.fixture
async def shim() -> AsyncIterator[Shim]:
    async with AsyncExitStack() as stack:
        yield await _built(stack, report_condition=True)


async def _built(stack: AsyncExitStack, *, report_condition: bool) -> Shim:
    root = stack.enter_context(tempfile.TemporaryDirectory(prefix="crust-"))
    driver, back = FakeDriver(), FakeRuntime()  # type: ignore[abstract]
    server = grpc.aio.server()
    runtime_pb2_grpc.add_RuntimeServicer_to_server(back, server)
    server.add_insecure_port(f"unix:{root}/runtime.sock")
    await server.start()
    stack.push_async_callback(server.stop, None)
    await stack.enter_async_context(fake_driver.serving(driver, f"{root}/driver.sock"))
    settings = ShimSettings(
        socket=f"{root}/shim.sock",
        driver_socket=f"{root}/driver.sock",
        runtime_socket=f"{root}/runtime.sock",
        csi_profile="1.12" if report_condition else "1.13",
        wrap=False,
    )
    await stack.enter_async_context(shim_process.serving(settings))
    caller = await stack.enter_async_context(channel.connect(f"{root}/shim.sock"))
    return Shim(driver, back, Co(caller, CALLERS_S, metadata=extensions.METADATA))


class TestShim:
    """The contract, call by call."""

    @pytest.mark.spec("D-8", "D-9")
    async def test_flagged_publish_answers_metadata(self, shim: Shim) -> None:
        answer = await shim.publish()
        assert answer.deferred_mount.block_device.path == "/dev/fake-vol-1"
        assert shim.driver.published[TARGET].deferred

    @pytest.mark.spec("D-9")
    async def test_host_publish_passes_to_the_driver(self, shim: Shim) -> None:
        answer = await shim.publish(defer=False)
        assert not answer.HasField("deferred_mount")
        assert not shim.driver.published[TARGET].deferred

    @pytest.mark.spec("D-3")
    async def test_capabilities_are_reported_only_to_callers_that_opt_in(self, shim: Shim) -> None:
        asked = csi_pb2.NodeGetCapabilitiesRequest()
        plain = await shim.co.node.NodeGetCapabilities(asked, timeout=10)
        assert all(capability.rpc.type < 20000 for capability in plain.capabilities)
        knows = await shim.co.node.NodeGetCapabilities(
            asked, metadata=(("crust-extensions", "other, deferral"),), timeout=10
        )
        assert 20526 in [capability.rpc.type for capability in knows.capabilities]

    @pytest.mark.spec("D-4")
    async def test_driver_without_deferral_is_not_called(self, shim: Shim) -> None:
        shim.driver.defers = False
        words = ("DEFER_FS_OPS", "use a driver that supports deferral")
        await refused(shim.publish(), Code.UNIMPLEMENTED, *words)
        assert shim.driver.called("NodePublishVolume") == []
        shim.driver.defers = True
        await shim.publish()

    @pytest.mark.spec("D-7")
    async def test_driver_sees_that_its_caller_knows_deferral(self, shim: Shim) -> None:
        await shim.publish()
        await shim.expand(1)
        for call in (
            *shim.driver.called("NodePublishVolume"),
            *shim.driver.called("NodeExpandVolume"),
        ):
            assert call.request.defer_fs_ops
            assert ("crust-extensions", "deferral") in call.metadata

    async def test_code_that_the_driver_sets_is_its_answer(
        self, shim: Shim, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By set_code and an empty message, as many servicers in Python refuse."""

        async def set_only(failure: Failure, context: Any) -> None:
            context.set_code(failure.code)
            context.set_details(failure.details)

        monkeypatch.setattr(shim.driver, "refuse", set_only)
        shim.driver.alter = lambda answer: answer.Clear()
        shim.driver.failing["NodePublishVolume"] = Failure(Code.RESOURCE_EXHAUSTED, "too many")
        await refused(shim.publish(), Code.RESOURCE_EXHAUSTED, "too many")
        assert shim.driver.called("NodeUnpublishVolume") == []

    @pytest.mark.spec("D-25")
    async def test_flagged_statistics_come_from_the_runtime(self, shim: Shim) -> None:
        shim.runtime.condition = "read-only"
        answer = await shim.stats()
        assert answer.usage[0].total == 1000
        assert answer.volume_condition.message == "read-only"
        assert shim.driver.called("NodeGetVolumeStats") == []
        assert (await shim.stats(flag=False)).usage[0].total == 7

    @pytest.mark.parametrize(
        ("code", "details"),
        [
            (Code.FAILED_PRECONDITION, "no sandbox has it"),
            (Code.NOT_FOUND, "not deferred"),
            (Code.UNAVAILABLE, "the handler is away"),
            (Code.INTERNAL, "the guest hangs"),
        ],
    )
    async def test_refusal_of_runtime_arrives_with_code_and_sentence(
        self, shim: Shim, code: Code, details: str
    ) -> None:
        shim.runtime.failure = Failure(code, details)
        await refused(shim.stats(), code, details)
        await refused(shim.expand(1), code, details)

    @pytest.mark.spec("D-26")
    async def test_expand_grows_the_device_and_then_the_whole_filesystem(self, shim: Shim) -> None:
        answer = await shim.expand(80 * MIB, limit=100 * MIB)
        assert answer.capacity_bytes == 80 * MIB
        assert shim.runtime.expansions == [(TARGET, 80 * MIB, 100 * MIB)]
        await shim.expand(1)
        assert shim.runtime.expansions[1:] == [(TARGET, 80 * MIB, 0)]

    @pytest.mark.spec("D-26", "D-27")
    async def test_driver_that_does_not_grow_stops_the_expansion(self, shim: Shim) -> None:
        shim.driver.failures["NodeExpandVolume"] = Failure(Code.OUT_OF_RANGE, "too large")
        await refused(shim.expand(1), Code.OUT_OF_RANGE, "too large")
        await refused(shim.expand(10, limit=5), Code.OUT_OF_RANGE, "above limit_bytes")
        assert shim.runtime.expansions == []

    @pytest.mark.parametrize("path", ["", "relative", "/a/../b"])
    async def test_volume_path_that_is_no_target_is_refused(self, shim: Shim, path: str) -> None:
        await refused(shim.stats(path), Code.INVALID_ARGUMENT, "volume_path")

    @pytest.mark.spec("D-28")
    async def test_calls_without_the_flag_pass_to_the_driver(self, shim: Shim) -> None:
        info = await shim.co.node.NodeGetInfo(csi_pb2.NodeGetInfoRequest(), timeout=10)
        assert info.node_id == "node-1"
        request = csi_pb2.NodeStageVolumeRequest(volume_id="v")
        await shim.co.node.NodeStageVolume(request, metadata=(("x-trace", "1"),), timeout=10)
        (call,) = shim.driver.called("NodeStageVolume")
        assert ("x-trace", "1") in call.metadata


async def test_csi_1_13_profile_reports_no_condition() -> None:
    async with AsyncExitStack() as stack:
        shim = await _built(stack, report_condition=False)
        shim.runtime.condition = "read-only"
        assert not (await shim.stats()).HasField("volume_condition")


async def test_unknown_fields_pass_the_process_in_both_kinds_of_calls() -> None:
    unknown = b"\xaa\xf7\x07\x05later"
    async with AsyncExitStack() as stack:
        shim = await _built(stack, report_condition=True)
        raw: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        raw = shim.co.channel.unary_unary("/csi.v1.Node/NodePublishVolume")
        for defer in (True, False):
            data = publish_request("vol-1", f"{TARGET}{defer}", defer=defer).SerializeToString()
            await raw(data + unknown, metadata=extensions.METADATA, timeout=10)
            assert b"later" in shim.driver.calls[-1].request.SerializeToString()


# The library in a driver whose process has its own csi_pb2.


ROOT = Path(__file__).parents[3]
PROTO = ROOT / "specs" / "proto" / "crust" / "wire" / "csi" / "v1" / "csi.proto"


@pytest.fixture(scope="module")
def own_csi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generated code of a CSI without crust's fields."""
    directory = tmp_path_factory.mktemp("own")
    text = re.sub(r".* (defer_fs_ops|deferred_mount) = .*\n", "", PROTO.read_text())
    (directory / "csi.proto").write_text(text)
    outputs = [f"--python_out={directory}", f"--grpc_python_out={directory}"]
    argv = [sys.executable, "-m", "grpc_tools.protoc", f"-I{directory}", *outputs, "csi.proto"]
    subprocess.run(argv, check=True, capture_output=True, cwd=directory)
    return directory


@pytest.mark.parametrize("order", ["driver-first", "crust-first"])
def test_process_with_its_own_csi_pb2_defers(own_csi: Path, order: str) -> None:
    argv = [sys.executable, "-m", "tests.support.drivers.drivers_own_csi", str(own_csi), order]
    ran = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {
        "device": "/dev/loop1",
        "identity": 99,
        "plain": False,
        "told": [1, 20526, 20527, 20528],
        "untold": [1],
    }


def test_raw_block_volume_is_not_deferred_by_the_helper() -> None:
    request = publish_request("v", "/t", capability(block=True))
    with raised("CannotDeferRawBlock", match="raw block"):
        library.deferred_mount("/dev/loop1", "ext4", request)


_THREADS = 3


class Hang:
    """A function of the shim that hangs until `released`."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.count = 0
        self._begun = threading.Semaphore(0)

    def __call__(self, *_: Any) -> Any:
        self.count += 1
        self._begun.release()
        self.released.wait()
        raise OSError(5, "the disk came back broken")

    async def begins(self) -> None:
        assert await asyncio.to_thread(self._begun.acquire, timeout=50)


@asynccontextmanager
async def small_shim(places: Places, hang: Hang) -> AsyncIterator[tuple[Daemon, grpc.aio.Channel]]:
    """A shim with few threads around a driver that knows nothing of deferral, and a caller."""
    threads, driver = Workers("the shim at /s", limit=_THREADS), FakeDriver(defers=False)
    wraps = Wrapping(places.kubelet)
    async with (
        fake_driver.serving(driver, places.driver),
        nodes.shim(places, wrapping=wraps, threads=threads) as daemon,
        channel.connect(places.shim) as co,
    ):
        try:
            yield daemon, co
        finally:
            hang.released.set()


async def publish(places: Places, co: grpc.aio.Channel, name: str) -> None:
    staging = f"{places.kubelet}/{name}/globalmount"
    context = {"crust.dev/defer": "always", "crust.dev/runtime-handler": "kata"}
    await Co(co).stage(name, staging, volume_context=context)
    await Co(co).publish(name, places.target(name), staging=staging, volume_context=context)


def watch_locked(monkeypatch: pytest.MonkeyPatch) -> asyncio.Lock:
    """The watch looks only while it has this lock."""
    look, lock = WorkerWatch.check_threads, asyncio.Lock()

    async def with_lock(watch: WorkerWatch) -> None:
        async with lock:
            await look(watch)

    monkeypatch.setattr(WorkerWatch, "check_threads", with_lock)
    return lock


async def test_shim_whose_threads_hang_is_not_ready_until_one_frees(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_watch, "CHECK_S", 0.01)
    monkeypatch.setattr(workers, "FREE_WITHIN_S", 30)
    checks, hang = watch_locked(monkeypatch), Hang()
    monkeypatch.setattr(leaves, "device", hang)
    async with small_shim(places, hang) as (daemon, co):
        await until_probe(co, Code.OK)
        daemon.check_ready()
        calls = []
        async with checks:
            for number in range(_THREADS):
                calls.append(asyncio.create_task(publish(places, co, f"dead-{number}")))
                await hang.begins()
            monkeypatch.setattr(workers, "FREE_WITHIN_S", 0.01)
        text = await until_probe(co, Code.UNAVAILABLE, "[NoWorkerFree] the shim at /s cannot")
        assert f"none of its {_THREADS} threads" in text
        assert "NodePublishVolume of dead-0" in text
        assert "check the disks and mounts" in text
        with pytest.raises(workers.NoWorkerFree, match="the shim at /s"):
            daemon.check_ready()
        await refused(publish(places, co, "vol-2"), Code.UNAVAILABLE, "the shim at /s cannot")
        monkeypatch.setattr(workers, "FREE_WITHIN_S", 30)
        hang.released.set()
        for call in calls:
            await refused(call, Code.INTERNAL)
        await until_probe(co, Code.OK)
        daemon.check_ready()


async def test_shim_whose_looks_hang_is_not_ready_until_one_ends(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_watch, "CHECK_S", 0.01)
    monkeypatch.setattr(node_shim, "_LOOK_S", 0.01)
    hang = Hang()
    monkeypatch.setattr(private_directories, "is_staged", hang)
    async with small_shim(places, hang) as (daemon, co):
        for name in [f"dead-{number}" for number in range(_THREADS)]:
            for _ in range(2):
                await refused(Co(co).unstage(name, "/s"), Code.UNAVAILABLE, name)
        assert hang.count == _THREADS, "a retry takes no thread"
        monkeypatch.setattr(workers, "FREE_WITHIN_S", 0.01)
        await until_probe(co, Code.UNAVAILABLE, "[NoWorkerFree] the shim at /s cannot")
        with pytest.raises(workers.NoWorkerFree):
            daemon.check_ready()
        hang.released.set()
        await until_probe(co, Code.OK)


async def test_shim_tells_no_watchdog_beside_the_proxy(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    monkeypatch.setattr(systemd, "_send", lambda message, _: sent.append(message))
    async with small_shim(places, Hang()) as (_, co):
        await until_probe(co, Code.OK)
    assert sent == [b"READY=1"]
