"""The driver and the runtime of the authors' pages, from the pages' text, with real shim and proxy between."""

import asyncio
import os
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from crust.rpc import channel
from tests.support.co import Co
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
    calls = Co(co, CALL_S, waits=True)
    wish = {"crust.dev/defer": "always", "crust.dev/runtime-handler": "box"}
    volume = await calls.create("one", size=32 * MIB, parameters=wish)
    target, staging = f"{kubelet}/pods/one/mount", f"{kubelet}/staging"
    os.makedirs(os.path.dirname(target))
    volume_id, context = volume.volume_id, volume.volume_context
    await calls.stage(volume_id, staging, volume_context=context)
    await calls.publish(volume_id, target, defer=False, staging=staging, volume_context=context)
    assert await _said(runtime, f"start box-1 {target}") == "ok"
    code = grpc.StatusCode.FAILED_PRECONDITION
    await refused(calls.unpublish(volume_id, target), code, "box-1")
    stats = await calls.stats(volume_id, target)
    assert 16 * MIB < stats.usage[0].total <= 32 * MIB
    assert await _said(runtime, "stop box-1") == "ok"
    await calls.unpublish(volume_id, target)
    await calls.unstage(volume_id, staging)
    await calls.delete(volume_id)
