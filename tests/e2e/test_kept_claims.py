"""The claims of a microVM in the hands of a keeper, as for a hypervisor that takes no descriptors."""

import asyncio
import os
import select
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from crust.core import volumes
from crust.handoff import claims, layout
from crust.runtime_handler import claim_volume, keepers
from crust.wire.csi.v1 import csi_pb2
from examples.kata.demo.node import HANDLER
from tests.support.faults.refusals import refused
from tests.support.nodes.whole_node import WholeNode
from tests.support.runtimes.keeper_processes import kill_all_keepers

pytestmark = [pytest.mark.vm, pytest.mark.timeout(240)]

BOOT = "cat /proc/sys/kernel/random/boot_id"


@pytest_asyncio.fixture
async def node(fresh_node: WholeNode) -> AsyncIterator[WholeNode]:
    """A node whose runtime has keepers."""
    await fresh_node.daemons.stop("runtime")
    fresh_node.daemons.runtime_options = ("--claims=keeper",)
    await start_runtime(fresh_node)
    yield fresh_node


async def start_runtime(node: WholeNode) -> None:
    await node.daemons.start("runtime")
    await node.kubelet.wait_ready(HANDLER)


def keeper_socket(node: WholeNode) -> Path:
    return node.daemons.paths.kata_run / "sandboxes" / "one" / "keeper.sock"


def entry(node: WholeNode, target: Path) -> layout.EntryPaths:
    root = str(node.daemons.paths.volumes)
    return layout.Layout(root).entry(volumes.TargetPath.parse(str(target)))


def held(node: WholeNode) -> list[int]:
    with keepers.connect(keeper_socket(node)) as keeper:
        return list(keeper.held().values())


async def held_again(node: WholeNode) -> list[int]:
    """What the next keeper holds; the runtime has noticed by itself that the one before is gone."""
    while True:
        try:
            if found := await asyncio.to_thread(held, node):
                return found
        except keepers.KeeperGone:
            await asyncio.sleep(0.05)


async def kill_qemu(node: WholeNode) -> None:
    """Kill it, and wait until its keepers have ended: they need a moment to see it."""
    process = os.pidfd_open(await node.qemu_pid("one"))
    with keepers.connect(keeper_socket(node)) as keeper:
        pids = [os.pidfd_open(pid) for pid in keeper.pids]
    signal.pidfd_send_signal(process, signal.SIGKILL)
    for end in (process, *pids):
        await ended(end)


async def unpublished(node: WholeNode, volume: csi_pb2.Volume, target: Path) -> None:
    """Unpublish, as often as a kubelet would: the runtime may still give the claim of a dead VM to a new keeper."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await node.unpublish(volume, target)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                    raise
                await asyncio.sleep(0.05)


async def ended(process: int) -> None:
    assert (await asyncio.to_thread(select.select, [process], [], [], 60))[0]
    os.close(process)


@pytest.mark.spec("H-43")
async def test_kept_claim_outlives_runtime_and_keepers_until_the_vm_ends(node: WholeNode) -> None:
    volume = await node.volume()
    target = await node.publish(volume)
    boot = await node.output("one", target, f"{BOOT}; echo kept > /data/f")
    assert held(node) == [2]
    qemu = await node.qemu_pid("one")
    assert claims.ClaimLock.of_holder(entry(node, target), qemu) is None, "QEMU has no copy"

    await node.daemons.kill("runtime")
    ending = node.kubelet.unpublish(volume, target)
    await refused(ending, grpc.StatusCode.FAILED_PRECONDITION, "one")
    await start_runtime(node)
    assert (await node.output("one", target, f"{BOOT}; cat /data/f")).split() == [boot, "kept"]

    await asyncio.to_thread(kill_all_keepers, keeper_socket(node))
    assert await held_again(node) == [2]
    assert claims.is_held(entry(node, target))
    assert await node.output("one", target, BOOT) == boot

    await kill_qemu(node)
    await unpublished(node, volume, target)


@pytest.mark.spec("H-46")
async def test_vm_whose_claim_somebody_had_meanwhile_is_killed(node: WholeNode) -> None:
    volume = await node.volume()
    target = await node.publish(volume)
    await node.output("one", target, "true")
    qemu = os.pidfd_open(await node.qemu_pid("one"))
    await node.daemons.kill("runtime")
    await asyncio.to_thread(kill_all_keepers, keeper_socket(node))
    root, sandbox = str(node.daemons.paths.volumes), volumes.SandboxId("two")
    where = volumes.TargetPath.parse(str(target))
    with claim_volume(root, where, sandbox, volumes.HandlerName(HANDLER)):
        await start_runtime(node)
        await ended(qemu)
        found = claims.read(entry(node, target))
        assert found is not None
        assert (found.sandbox_id, found.live) == ("two", True)
    assert await node.runtime.list() == []
    await node.unpublish(volume, target)
