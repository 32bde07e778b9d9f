"""The runtime's daemon as a process: stopped while a command runs, and started beside a guest that hangs.

Each test has a node of its own, because it restarts processes.
"""

import asyncio
import os
import signal
from pathlib import Path

import grpc
import pytest

from examples.kata.demo.node import HANDLER
from examples.kata.runtime import messages
from examples.kata.runtime.client import RuntimeRefused, RuntimeUnreachable
from tests.support.nodes.whole_node import WholeNode, refusal

pytestmark = [pytest.mark.vm, pytest.mark.timeout(240)]


def sandboxes(fresh_node: WholeNode) -> list[str]:
    return sorted(path.name for path in (fresh_node.daemons.paths.kata_run / "sandboxes").iterdir())


async def run_until_first_output(fresh_node: WholeNode, target: Path) -> asyncio.Task[object]:
    """A running command in a temporary sandbox, which does not end by itself."""
    spoke = asyncio.Event()
    mount = messages.Mount(source=str(target), destination="/data")
    request = messages.Run(
        sandbox="once", argv=("/bin/sh", "-c", "echo begun; sleep 999"), mounts=(mount,)
    )
    running: asyncio.Task[object] = asyncio.create_task(
        fresh_node.runtime.run(request, lambda *_: spoke.set())
    )
    async with asyncio.timeout(60):
        await spoke.wait()
    return running


async def test_stopped_runtime_ends_running_sandbox_and_its_claim(fresh_node: WholeNode) -> None:
    volume = await fresh_node.volume()
    target = await fresh_node.publish(volume)
    running = await run_until_first_output(fresh_node, target)
    await fresh_node.daemons.stop("runtime")
    with pytest.raises(RuntimeUnreachable):
        await running
    assert sandboxes(fresh_node) == []
    await fresh_node.unpublish(volume, target)
    await fresh_node.daemons.start("runtime")
    await fresh_node.kubelet.wait_ready(HANDLER)


async def test_hung_guest_blocks_no_start_of_the_runtime(fresh_node: WholeNode) -> None:
    volume = await fresh_node.volume()
    target = await fresh_node.publish(volume)
    await fresh_node.output("stuck", target, "echo kept > /data/f; sync")
    qemu = await fresh_node.qemu_pid("stuck")
    await fresh_node.daemons.kill("runtime")
    os.kill(qemu, signal.SIGSTOP)
    await fresh_node.daemons.start("runtime")
    await fresh_node.kubelet.wait_ready(HANDLER)
    assert await fresh_node.runtime.not_adopted() == ("stuck",)
    with pytest.raises(RuntimeRefused, match="stuck"):
        await fresh_node.run("stuck", target, "true")
    code, _ = await refusal(fresh_node.kubelet.unpublish(volume, target))
    assert code is grpc.StatusCode.FAILED_PRECONDITION, "the VM still has the claim"
    await fresh_node.runtime.stop("stuck")
    assert await fresh_node.output("next", target, "cat /data/f") == "kept"
