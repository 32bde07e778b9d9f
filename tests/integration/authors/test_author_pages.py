"""The driver and the runtime of the authors' pages, from the pages' text, with real shim and proxy between."""

import asyncio
import os
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support.faults.refusals import refused
from tests.support.pages.page_programs import program

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]
MIB = 1 << 20
CALL_S = 30


@asynccontextmanager
async def _running(*argv: str) -> AsyncIterator[Process]:
    environment = {key: each for key, each in os.environ.items() if not key.startswith("CRUST_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *argv, stdin=PIPE, stdout=PIPE, env=environment
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _said(runtime: Process, line: str) -> str:
    assert runtime.stdin is not None
    assert runtime.stdout is not None
    runtime.stdin.write(f"{line}\n".encode())
    async with asyncio.timeout(CALL_S):
        return (await runtime.stdout.readline()).decode().strip()


def _capability() -> csi_pb2.VolumeCapability:
    made = csi_pb2.VolumeCapability(mount=csi_pb2.VolumeCapability.MountVolume(fs_type="ext4"))
    made.access_mode.mode = csi_pb2.VolumeCapability.AccessMode.SINGLE_NODE_WRITER
    return made


async def test_driver_and_runtime_of_the_pages_work_with_the_proxy(tmp_path: Path) -> None:
    for page, name in (("driver-author.md", "driver.py"), ("runtime-author.md", "runtime.py")):
        (tmp_path / name).write_text(program(page))
    async with AsyncExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="crust-"))
        for name in ("pool", "run", "kubelet", "mnt"):
            os.mkdir(f"{root}/{name}", 0o700)
        driver = (f"{root}/driver.sock", f"{root}/pool")
        await stack.enter_async_context(_running(str(tmp_path / "driver.py"), *driver))
        await stack.enter_async_context(
            _running(
                *("-m", "crust", "shim", "--driver-socket", f"{root}/driver.sock"),
                *("--socket", f"{root}/shim.sock", "--runtime-socket", f"{root}/run/runtime.sock"),
                *("--kubelet-root", f"{root}/kubelet", "--no-check-propagation"),
            )
        )
        served = f"mini.csi.example,{root}/csi.sock,{root}/shim.sock"
        await stack.enter_async_context(
            _running(
                *("-m", "crust", "proxy", "--driver", served, "--run-dir", f"{root}/run"),
                *("--volumes-root", f"{root}/volumes", "--target-root", f"{root}/kubelet"),
                *("--no-check-propagation", "--handler-grace-s", "20"),
            )
        )
        places = (f"{root}/run/handlers.sock", f"{root}/box.sock", f"{root}/mnt")
        runtime = await stack.enter_async_context(_running(str(tmp_path / "runtime.py"), *places))
        co = await stack.enter_async_context(channel.connect(f"{root}/csi.sock"))
        await _life(co, runtime, f"{root}/kubelet")
        assert os.listdir(f"{root}/pool") == []


async def _life(co: grpc.aio.Channel, runtime: Process, kubelet: str) -> None:
    """Create, publish deferred, start a sandbox, ask for statistics, and all the way back."""
    controller: Any = csi_pb2_grpc.ControllerStub(co)
    node: Any = csi_pb2_grpc.NodeStub(co)
    created = await controller.CreateVolume(
        csi_pb2.CreateVolumeRequest(
            name="one",
            volume_capabilities=[_capability()],
            capacity_range=csi_pb2.CapacityRange(required_bytes=32 * MIB),
            parameters={"crust.dev/defer": "always", "crust.dev/runtime-handler": "box"},
        ),
        timeout=CALL_S,
        wait_for_ready=True,
    )
    volume, target = created.volume, f"{kubelet}/pods/one/mount"
    os.makedirs(os.path.dirname(target))
    staged = {"volume_id": volume.volume_id, "staging_target_path": f"{kubelet}/staging"}
    published = {"volume_id": volume.volume_id, "target_path": target}
    context = {"volume_capability": _capability(), "volume_context": volume.volume_context}
    stage = csi_pb2.NodeStageVolumeRequest(**staged, **context)
    await node.NodeStageVolume(stage, timeout=CALL_S)
    publish = csi_pb2.NodePublishVolumeRequest(
        **published, staging_target_path=staged["staging_target_path"], **context
    )
    await node.NodePublishVolume(publish, timeout=CALL_S)
    assert await _said(runtime, f"start box-1 {target}") == "ok"
    unpublish = csi_pb2.NodeUnpublishVolumeRequest(**published)
    code = grpc.StatusCode.FAILED_PRECONDITION
    await refused(node.NodeUnpublishVolume(unpublish, timeout=CALL_S), code, "box-1")
    stats = await node.NodeGetVolumeStats(
        csi_pb2.NodeGetVolumeStatsRequest(volume_id=volume.volume_id, volume_path=target),
        timeout=CALL_S,
    )
    assert 16 * MIB < stats.usage[0].total <= 32 * MIB
    assert await _said(runtime, "stop box-1") == "ok"
    await node.NodeUnpublishVolume(unpublish, timeout=CALL_S)
    await node.NodeUnstageVolume(csi_pb2.NodeUnstageVolumeRequest(**staged), timeout=CALL_S)
    gone = csi_pb2.DeleteVolumeRequest(volume_id=volume.volume_id)
    await controller.DeleteVolume(gone, timeout=CALL_S)
