"""The contract of a shim in front of a driver's socket; and a shim whose threads all hang on volumes."""

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from crust.csi_shim import library, shim_process
from crust.csi_shim.wrap import leaves, node_shim, private_directories
from crust.csi_shim.wrap.node_shim import Wrapping
from crust.host.process import systemd, workers
from crust.host.process.workers import Workers
from crust.rpc import channel
from crust.rpc.messages import extensions
from crust.rpc.serving import worker_watch
from crust.rpc.serving.daemon import Daemon
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import Co, capability, publish_request
from tests.support.drivers.fake_driver import Failure, FakeDriver
from tests.support.faults.refusals import refused, until_probe
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places
from tests.support.raised import raised

Code = grpc.StatusCode
TARGET = "/var/lib/kubelet/pods/one/mount"


@dataclass
class Shim:
    """A shim that serves, what it wraps, and a caller that knows deferral."""

    driver: FakeDriver
    co: Co

    async def publish(self) -> csi_pb2.NodePublishVolumeResponse:
        return await self.co.publish("vol-1", TARGET)


@pytest.fixture
async def shim(places: Places) -> AsyncIterator[Shim]:
    driver = FakeDriver()
    async with (
        FakeNode(places, parts=("driver", "shim"), driver=driver),
        channel.connect(places.shim) as caller,
    ):
        yield Shim(driver, Co(caller, metadata=extensions.METADATA))


@pytest.mark.spec("D-3")
async def test_capabilities_are_reported_only_to_callers_that_opt_in(shim: Shim) -> None:
    asked = csi_pb2.NodeGetCapabilitiesRequest()
    plain = await shim.co.node.NodeGetCapabilities(asked, timeout=10)
    assert all(capability.rpc.type < 20000 for capability in plain.capabilities)
    knows = await shim.co.node.NodeGetCapabilities(
        asked, metadata=(("crust-extensions", "other, deferral"),), timeout=10
    )
    assert 20526 in [capability.rpc.type for capability in knows.capabilities]


@pytest.mark.spec("D-4")
async def test_driver_without_deferral_is_not_called(shim: Shim) -> None:
    shim.driver.defers = False
    words = ("DEFER_FS_OPS", "use a driver that supports deferral")
    await refused(shim.publish(), Code.UNIMPLEMENTED, *words)
    assert shim.driver.called("NodePublishVolume") == []
    shim.driver.defers = True
    await shim.publish()


async def test_code_that_the_driver_sets_is_its_answer(
    shim: Shim, monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.parametrize("path", ["", "relative", "/a/../b"])
async def test_volume_path_that_is_no_target_is_refused(shim: Shim, path: str) -> None:
    stats = shim.co.stats("vol-1", path, defer_fs_ops=True)
    await refused(stats, Code.INVALID_ARGUMENT, "volume_path")


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
        self.begun, self.released = threading.Event(), threading.Event()
        self.count = 0

    def __call__(self, *_: Any) -> Any:
        self.count += 1
        self.begun.set()
        self.released.wait()
        raise OSError(5, "the disk came back broken")


@asynccontextmanager
async def small_shim(places: Places, hang: Hang) -> AsyncIterator[tuple[Daemon, grpc.aio.Channel]]:
    """A shim with few threads around a driver that knows nothing of deferral, and a caller."""
    threads, driver = Workers("the shim at /s", limit=_THREADS), FakeDriver(defers=False)
    wrapping = Wrapping(places.kubelet)
    async with (
        FakeNode(places, parts=("driver",), driver=driver, wrapping=wrapping) as node,
        shim_process.serving(node.shim_settings(), threads=threads) as daemon,
        channel.connect(places.shim) as co,
    ):
        try:
            yield daemon, co
        finally:
            hang.released.set()


async def publish(places: Places, co: Co, name: str) -> None:
    staging = f"{places.kubelet}/{name}/globalmount"
    context = {"crust.dev/defer": "always", "crust.dev/runtime-handler": "kata"}
    await co.stage(name, staging, volume_context=context)
    await co.publish(name, places.target(name), staging=staging, volume_context=context)


async def test_shim_whose_threads_hang_is_not_ready_until_one_frees(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One hangs in an operation, and the others in looks at directories."""
    monkeypatch.setattr(worker_watch, "CHECK_S", 0.01)
    monkeypatch.setattr(node_shim, "_LOOK_S", 0.01)
    hang = Hang()
    monkeypatch.setattr(leaves, "device", hang)
    async with small_shim(places, hang) as (daemon, co):
        await until_probe(co, Code.OK)
        daemon.check_ready()
        publishing = asyncio.create_task(publish(places, Co(co), "dead-0"))
        assert await asyncio.to_thread(hang.begun.wait, 50)
        monkeypatch.setattr(private_directories, "is_staged", hang)
        for name in [f"dead-{number}" for number in range(1, _THREADS)]:
            for _ in range(2):
                await refused(Co(co).unstage(name, "/s"), Code.UNAVAILABLE, name)
        assert hang.count == _THREADS, "a retry takes no thread"
        monkeypatch.setattr(workers, "FREE_WITHIN_S", 0.01)
        text = await until_probe(co, Code.UNAVAILABLE, "[NoWorkerFree] the shim at /s cannot")
        assert "NodePublishVolume of dead-0" in text
        with pytest.raises(workers.NoWorkerFree, match="the shim at /s"):
            daemon.check_ready()
        monkeypatch.setattr(workers, "FREE_WITHIN_S", 30)
        hang.released.set()
        await refused(publishing, Code.INTERNAL)
        await until_probe(co, Code.OK)
        daemon.check_ready()


async def test_shim_tells_no_watchdog_beside_the_proxy(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    monkeypatch.setattr(systemd, "_send", lambda message, _: sent.append(message))
    async with small_shim(places, Hang()) as (_, co):
        await until_probe(co, Code.OK)
    assert sent == [b"READY=1"]
