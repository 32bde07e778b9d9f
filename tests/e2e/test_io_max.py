"""Limits by control groups v2, in a kernel that has them: this machine's may have v1 alone."""

import sys
from pathlib import Path

import pytest

from tests.support.nodes import kernel_node
from tests.support.runtimes import io_max_in_guest

pytestmark = pytest.mark.vm


async def test_kernel_keeps_the_limits_of_io_max(tmp_path: Path) -> None:
    pytest_alone = (sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider")
    disks = len(io_max_in_guest.DISKS)
    with kernel_node.network() as network:
        async with kernel_node.running(tmp_path, network, disks=disks) as node:
            code, output = await node.ask(*pytest_alone, io_max_in_guest.__file__)
    assert (code, "4 passed" in output) == (0, True), output
