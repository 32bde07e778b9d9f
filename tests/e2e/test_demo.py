"""Runs `make demo` and `make cluster-demo`, which the README advertises."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from crust.host.mounts import mountinfo


@pytest.mark.vm
async def test_demo_succeeds_and_leaves_nothing_behind(guest_image: object) -> None:
    code, printed = await run("examples.kata.demo")
    assert (code, "FAILED  " in printed) == (0, False), printed
    # both scenarios ran to their end
    assert printed.count(" ok  check that no orphans remain") == 2


@pytest.mark.vm
async def test_demo_of_many_nodes_succeeds_and_leaves_nothing_behind(guest_image: object) -> None:
    code, printed = await run("examples.cluster")
    assert (code, "FAILED  " in printed) == (0, False), printed
    assert printed.count(" ok  check that no orphans remain") == 1
    assert not [mount for mount in mountinfo.read_all() if "/crust-net-" in mount.target]


@pytest.mark.root
async def test_demo_ends_as_soon_as_a_daemon_does_not_start() -> None:
    code, printed = await run("examples.kata.demo", CRUST_COLOUR="red")
    assert (code, "ended with exit code 2 before the node was ready" in printed) == (1, True), (
        printed
    )
    assert "error_name=InvalidSettings" in printed


async def run(module: str, **environ: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=Path(__file__).parents[2],
        env={**os.environ, **environ},
    )
    out, _ = await process.communicate()
    return await process.wait(), out.decode()
