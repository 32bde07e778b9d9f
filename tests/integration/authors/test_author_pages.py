"""The drivers and the runtime of the authors' pages, from the pages' text, with real shim and proxy between."""

import asyncio
import os
import subprocess
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest

from crust.host.block import loop
from crust.rpc import channel
from tests.support import capabilities, processes
from tests.support.co import Co
from tests.support.drivers import own_driver
from tests.support.faults.refusals import refused, until_probe
from tests.support.nodes.places import Places
from tests.support.pages.page_programs import program

pytestmark = pytest.mark.root
MIB = 1 << 20
CALL_S = 30


@asynccontextmanager
async def _running(*argv: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class _Node(NamedTuple):
    root: str
    co: Co
    runtime: Process


async def _said(runtime: Process, line: str) -> str:
    assert runtime.stdin is not None
    assert runtime.stdout is not None
    runtime.stdin.write(f"{line}\n".encode())
    async with asyncio.timeout(CALL_S):
        return (await runtime.stdout.readline()).decode().strip()


@asynccontextmanager
async def _node(driver: str, *argv: str, tmp_path: Path) -> AsyncIterator[_Node]:
    """The driver of that name, which the program serves at ROOT/driver.sock; shim, proxy and the page's runtime."""
    (tmp_path / "runtime.py").write_text(program("runtime-author.md"))
    async with AsyncExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="crust-"))
        places = Places.make(root)
        for name in ("pool", "mnt"):
            os.mkdir(f"{root}/{name}", 0o700)
        await stack.enter_async_context(_running(*(word.replace("ROOT", root) for word in argv)))
        lines = places.arguments(driver)
        shim_and_proxy = {
            "shim": lines["shim"],
            "proxy": (*lines["proxy"], "--handler-grace-s=20"),
        }
        programs = own_driver.crust_programs(places, shim_and_proxy)
        stack.enter_context(processes.running(*programs.values()))
        arguments = (places.sockets.handlers, f"{root}/box.sock", f"{root}/mnt")
        runtime = await stack.enter_async_context(
            _running(sys.executable, str(tmp_path / "runtime.py"), *arguments)
        )
        connected = await stack.enter_async_context(channel.connect(places.csi))
        await until_probe(connected, grpc.StatusCode.OK, within_s=CALL_S)
        yield _Node(root, Co(connected, CALL_S, waits=True), runtime)


async def test_driver_and_runtime_of_the_pages_work_with_the_proxy(tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(program("driver-author.md"))
    driver = (sys.executable, str(tmp_path / "driver.py"), "ROOT/driver.sock", "ROOT/pool")
    async with _node("mini.csi.example", *driver, tmp_path=tmp_path) as node:
        await _life(node.co, node.runtime, f"{node.root}/kubelet")
        assert os.listdir(f"{node.root}/pool") == []


async def test_driver_in_go_defers_by_the_public_package(tmp_path: Path) -> None:
    capabilities.need("go-driver")
    driver = (str(capabilities.GO_DRIVER), "ROOT/driver.sock")
    async with _node("go.csi.example", *driver, tmp_path=tmp_path) as node:
        image = f"{node.root}/pool/volume.img"
        await asyncio.to_thread(_make_ext4, image)
        device = loop.attach(image)
        try:
            target = f"{node.root}/kubelet/pods/one/mount"
            os.makedirs(os.path.dirname(target))
            context = {"crust.dev/defer": "always", "crust.dev/runtime-handler": "box"}
            await node.co.publish(device.path, target, defer=False, volume_context=context)
            assert await _said(node.runtime, f"start box-1 {target}") == "ok"
            stats = await node.co.stats(device.path, target)
            assert 16 * MIB < stats.usage[0].total <= 32 * MIB
            assert await _said(node.runtime, "stop box-1") == "ok"
            await node.co.unpublish(device.path, target)
        finally:
            loop.detach(device)


def _make_ext4(image: str) -> None:
    with open(image, "wb") as file:
        file.truncate(32 * MIB)
    subprocess.run(["mkfs.ext4", "-q", image], check=True, timeout=60)


async def _life(calls: Co, runtime: Process, kubelet: str) -> None:
    """Create, publish deferred, start a sandbox, ask for statistics, and all the way back."""
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
