"""The driver in Go alone, asked in crust's messages: what the public package of CSI does not know is on the wire."""

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from crust.core import volumes
from crust.host.block import devices, loop
from crust.rpc import channel
from crust.rpc.messages import csi, extensions
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support import capabilities
from tests.support.co import capability

pytestmark = pytest.mark.root


@pytest.fixture(autouse=True)
def _built() -> None:
    capabilities.need("go-driver")


def test_tests_of_the_package_in_go_pass() -> None:
    ran = subprocess.run(
        [str(capabilities.GO_TESTS), "-test.v"], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout.count("--- PASS: Test") > 5, ran.stdout


def test_driver_without_arguments_says_how_it_is_called() -> None:
    ran = subprocess.run([str(capabilities.GO_DRIVER)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert ran.stderr == f"usage: {capabilities.GO_DRIVER} unix://SOCKET\n"


@asynccontextmanager
async def _driver(path: str) -> AsyncIterator["csi_pb2_grpc.NodeAsyncStub"]:
    process = await asyncio.create_subprocess_exec(str(capabilities.GO_DRIVER), f"unix://{path}")
    try:
        async with channel.connect(path) as connected:
            await asyncio.wait_for(connected.channel_ready(), 60)
            yield csi_pb2_grpc.NodeStub(connected)
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()


def _request(path: str, given: csi_pb2.VolumeCapability) -> csi_pb2.NodePublishVolumeRequest:
    return csi_pb2.NodePublishVolumeRequest(
        volume_id=path, target_path="/t", volume_capability=given, defer_fs_ops=True
    )


@pytest.mark.spec("D-2", "D-6", "D-12")
async def test_group_of_a_publish_is_in_the_answer(
    short_dir: Path, ext4_device: loop.LoopDevice
) -> None:
    given = capability(
        volume_supplemental_group="2000",
        volume_supplemental_group_change_policy="Always",
        mount_flags=["noatime"],
    )
    async with _driver(f"{short_dir}/s") as node:
        advertised = await node.NodeGetCapabilities(
            csi_pb2.NodeGetCapabilitiesRequest(), metadata=extensions.METADATA
        )
        answer = await node.NodePublishVolume(_request(ext4_device.path, given))
    rpc = csi_pb2.NodeServiceCapability.RPC
    assert [it.rpc.type for it in advertised.capabilities] == [
        rpc.DEFER_FS_OPS,
        rpc.DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP,
        rpc.DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP_CHANGE_POLICY,
    ]
    assert csi.deferred_mount(answer.deferred_mount) == volumes.DeferredMount(
        volumes.BlockSource(ext4_device.path, ext4_device.identity),
        "ext4",
        mount_options=("noatime",),
        group=volumes.GroupChange(2000, volumes.GroupPolicy.ALWAYS),
        capacity_bytes=devices.size_bytes(ext4_device.path),
    )


@pytest.mark.spec("D-3")
async def test_caller_that_knows_no_deferral_is_told_nothing(short_dir: Path) -> None:
    async with _driver(f"{short_dir}/s") as node:
        answer = await node.NodeGetCapabilities(csi_pb2.NodeGetCapabilitiesRequest())
    assert list(answer.capabilities) == []


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/dev/nowhere", grpc.StatusCode.NOT_FOUND),
        ("/dev/null", grpc.StatusCode.NOT_FOUND),
        pytest.param(f"/dev/{'n' * 300}", grpc.StatusCode.INTERNAL, id="ENAMETOOLONG"),
    ],
)
async def test_path_without_a_device_is_no_volume(
    short_dir: Path, path: str, code: grpc.StatusCode
) -> None:
    async with _driver(f"{short_dir}/s") as node:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await node.NodePublishVolume(_request(path, capability()))
    assert caught.value.code() is code


async def test_socket_of_a_killed_driver_is_replaced(short_dir: Path) -> None:
    path = f"{short_dir}/s"
    for _ in range(2):
        async with _driver(path) as node:
            await node.NodeGetInfo(csi_pb2.NodeGetInfoRequest())
        assert os.path.exists(path), "it was killed"


@pytest.mark.parametrize(("kind", "why"), [("file", "no socket"), ("driver", "another process")])
def test_what_is_no_left_socket_is_not_replaced(short_dir: Path, kind: str, why: str) -> None:
    path = short_dir / "s"
    with socket.socket(socket.AF_UNIX) as other:
        if kind == "driver":
            other.bind(str(path))
            other.listen()
        else:
            path.write_text("mine")
        argv = [str(capabilities.GO_DRIVER), f"unix://{path}"]
        ran = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert why in ran.stderr
    assert path.exists()
