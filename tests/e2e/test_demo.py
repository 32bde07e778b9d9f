"""Runs `make demo` and `make cluster-demo`, which the README advertises."""

import asyncio
import sys
from pathlib import Path

import pytest

from crust.host.mounts import mountinfo


@pytest.mark.vm
@pytest.mark.timeout(600)
async def test_demo_succeeds_and_leaves_nothing_behind(guest_image: object) -> None:
    printed = await printed_by("examples.kata.demo")
    # both scenarios ran to their end
    assert printed.count(" ok  check that no orphans remain") == 2


@pytest.mark.vm
@pytest.mark.timeout(900)
async def test_demo_of_many_nodes_succeeds_and_leaves_nothing_behind(guest_image: object) -> None:
    printed = await printed_by("examples.cluster")
    assert printed.count(" ok  check that no orphans remain") == 1
    # those that are mounted here: other tests, in other mount namespaces, have some at the same time
    here = [each.target for each in mountinfo.below("/run/netns")]
    assert not [each for each in here if Path(each).name.startswith("crust-")]


async def printed_by(module: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=Path(__file__).parents[2],
    )
    out, _ = await process.communicate()
    printed = out.decode()
    assert process.returncode == 0, printed
    assert "FAILED  " not in printed
    return printed
