"""Calls of a driver that hang, and the shim's threads."""

import asyncio
import os
import re
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from crust.csi_shim.wrap import leaves, private_directories, volume_operations
from crust.host.mounts import mount_api
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from examples.drivers import minimal
from tests.integration.wrap.conftest import DEFERRED, Wrapped
from tests.support.co import Co
from tests.support.drivers import remnants
from tests.support.drivers.wrapping_processes import wrapping
from tests.support.faults.hung_files import HungFile
from tests.support.faults.refusals import refused, refused_in_time, until_probe
from tests.support.runtimes.fake_handler import FakeHandler
from tests.support.runtimes.fake_handler import running as handler

pytestmark = pytest.mark.root


Code = grpc.StatusCode


class Hang:
    """Calls that hang until the end of the test, by one of their arguments."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.release = threading.Event()

    def around(self, function: Callable[..., Any], wanted: str) -> Callable[..., Any]:
        """The function, which hangs if it is called for `wanted`."""

        def call(*args: Any) -> Any:
            if wanted in map(str, args):
                self.begun.append(wanted)
                self.release.wait()
            return function(*args)

        return call


@pytest.fixture
def hang() -> Iterator[Hang]:
    hang = Hang()
    yield hang
    hang.release.set()


async def lives(node: Wrapped, name: str) -> None:
    """Another volume, from its stage to its end."""
    volume, target = await node.volume(name), node.target(name)
    for step in node.life(volume, target).values():
        await step()
    await node.delete_volume(volume.volume_id)


async def test_look_at_a_staging_path_that_hangs_takes_one_thread(
    cloud: Wrapped, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = await cloud.volume()
    monkeypatch.setattr(volume_operations, "_LOOK_S", 0.2)
    around = hang.around(private_directories.is_mounted, cloud.staging(volume))
    monkeypatch.setattr(private_directories, "is_mounted", around)
    for _ in range(4):
        await refused(
            cloud.stage(volume), Code.UNAVAILABLE, "SystemCallTimedOut", volume.volume_id[:40]
        )
    assert len(hang.begun) == 1
    await lives(cloud, "pvc-2")
    hang.release.set()
    await cloud.stage(volume)


async def test_operation_on_a_device_that_hangs_takes_one_thread(
    cloud: Wrapped, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, target = await cloud.staged_volume()
    around = hang.around(leaves.device, cloud.paths(volume).leaf(target))
    monkeypatch.setattr(leaves, "device", around)
    for _ in range(3):
        await refused_in_time(
            lambda: cloud.publish(volume, target, timeout_s=1), Code.ABORTED, "OperationOverdue"
        )
    await refused(cloud.unpublish(volume, target), Code.ABORTED, "NodePublishVolume")
    assert len(hang.begun) == 1
    await lives(cloud, "pvc-2")
    hang.release.set()
    await cloud.publish(volume, target)


_THREADS = 64
"""Of a shim."""


class HangingDriver(csi_pb2_grpc.NodeServicer, csi_pb2_grpc.IdentityServicer):
    """Raw block volumes whose nodes hang; it stages nothing."""

    def __init__(self) -> None:
        self.hung: dict[str, HungFile] = {}
        self._one_at_a_time = threading.Lock()

    def GetPluginInfo(self, request: Any, context: Any) -> csi_pb2.GetPluginInfoResponse:
        return csi_pb2.GetPluginInfoResponse(name=minimal.NAME, vendor_version="1")

    def GetPluginCapabilities(
        self, request: Any, context: Any
    ) -> csi_pb2.GetPluginCapabilitiesResponse:
        return csi_pb2.GetPluginCapabilitiesResponse()

    def Probe(self, request: Any, context: Any) -> csi_pb2.ProbeResponse:
        return csi_pb2.ProbeResponse()

    def NodeGetCapabilities(
        self, request: Any, context: Any
    ) -> csi_pb2.NodeGetCapabilitiesResponse:
        return csi_pb2.NodeGetCapabilitiesResponse()

    def NodePublishVolume(
        self, request: csi_pb2.NodePublishVolumeRequest, context: Any
    ) -> csi_pb2.NodePublishVolumeResponse:
        with self._one_at_a_time:
            Path(request.target_path).touch()
            self.hung[request.target_path] = HungFile(Path(request.target_path))
        return csi_pb2.NodePublishVolumeResponse()

    def NodeUnpublishVolume(
        self, request: csi_pb2.NodeUnpublishVolumeRequest, context: Any
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        with self._one_at_a_time:
            found = self.hung.pop(request.target_path, None)
            if found is not None:
                found.end()
                mount_api.unmount(request.target_path)
                os.unlink(request.target_path)
        return csi_pb2.NodeUnpublishVolumeResponse()

    def end(self) -> None:
        """The servers of all nodes die: what hangs there fails."""
        for each in [*self.hung.values()]:
            each.end()


@contextmanager
def serving(path: str) -> Iterator[HangingDriver]:
    driver = HangingDriver()  # type: ignore[abstract]
    server = grpc.server(futures.ThreadPoolExecutor(8))
    csi_pb2_grpc.add_IdentityServicer_to_server(driver, server)
    csi_pb2_grpc.add_NodeServicer_to_server(driver, server)
    server.add_insecure_port(f"unix:{path}")
    server.start()
    try:
        yield driver
    finally:
        driver.end()
        server.stop(None).wait()


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory with short paths, unmounted at the end."""
    with tempfile.TemporaryDirectory(prefix="crust-") as root:
        yield Path(root)
        remnants.remove(root)


def ready(base: Path) -> tuple[int, str]:
    """What /readyz of the process that has the shim answers. Blocks."""
    found = re.search(r"metrics  address=(\S+)", (base / "crust.log").read_text())
    assert found is not None
    try:
        with urllib.request.urlopen(f"http://{found[1]}/readyz", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def publish(base: Path, co: grpc.aio.Channel, name: str) -> None:
    """A publish; it is not answered in time, or not begun."""
    directory = base / "kubelet" / "pods" / name
    directory.mkdir(parents=True, exist_ok=True)
    with pytest.raises(grpc.aio.AioRpcError):
        await Co(co, 1).publish(
            name, str(directory / "mount"), defer=False, volume_context=DEFERRED
        )


@pytest.mark.parametrize("as_node", [True, False], ids=["node", "parts"])
async def test_full_shim_fails_its_probe_by_name(base: Path, *, as_node: bool) -> None:
    (base / "kubelet").mkdir()
    names = [f"vol-{number}" for number in range(_THREADS)]
    flags = ["--metrics-address=127.0.0.1:0"]
    with (
        serving(f"{base}/driver.sock") as driver,
        wrapping(base, "minimal", f"{base}/driver.sock", as_node=as_node, flags=flags) as frontend,
    ):
        try:
            async with (
                handler(
                    FakeHandler(),
                    proxy_socket=f"{base}/run/handlers.sock",
                    endpoint=f"{base}/handler.sock",
                ),
                channel.connect(frontend) as co,
            ):
                await until_probe(co, Code.OK)
                assert await asyncio.to_thread(ready, base) == (200, "ok\n")
                while len(driver.hung) < _THREADS:
                    await asyncio.gather(*(publish(base, co, each) for each in names))
                said = await until_probe(co, Code.UNAVAILABLE, "[NoWorkerFree] the shim at ")
                assert "NodePublishVolume of vol-" in said
                assert "check the disks and mounts of its volumes" in said
                code, why = await asyncio.to_thread(ready, base)
                assert (code, why.strip()) == (503, said)
                driver.end()
                await until_probe(co, Code.OK)
                assert await asyncio.to_thread(ready, base) == (200, "ok\n")
        finally:
            driver.end()
