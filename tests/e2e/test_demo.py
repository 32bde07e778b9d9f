"""Runs `make demo`, which the README advertises."""

import asyncio
import sys
from pathlib import Path

import pytest


@pytest.mark.vm
@pytest.mark.timeout(600)
async def test_demo_succeeds_and_leaves_nothing_behind(guest_image: object) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "examples.kata.demo",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=Path(__file__).parents[2],
    )
    out, _ = await process.communicate()
    printed = out.decode()
    assert process.returncode == 0, printed
    assert "FAILED  " not in printed
    # both scenarios ran to their end
    assert printed.count(" ok  check that no orphans remain") == 2
