"""Limits by control groups v2, in a kernel that has them: this machine's may have v1 alone."""

import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.nodes import kernel_node
from tests.support.runtimes import io_max_in_guest

pytestmark = [pytest.mark.vm, pytest.mark.timeout(240)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def answer(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    disks = len(io_max_in_guest.DISKS)
    with kernel_node.network() as network:
        directory = tmp_path_factory.mktemp("io-max")
        async with kernel_node.running(directory, network, disks=disks) as node:
            yield json.loads(await node.run(sys.executable, "-m", io_max_in_guest.__name__))


def test_obstacle_names_what_is_missing_and_the_remedy(answer: Any) -> None:
    root, group, controller, nothing = answer["obstacles"]
    assert "root group" in root
    assert group == "there is no pods in /run/cgroup"
    assert "write +io to /run/cgroup/cgroup.subtree_control" in controller
    assert nothing == ""


def test_set_replaces_previous_limits(answer: Any) -> None:
    whole, less, none, other, empty = answer["after_set"]
    for lines, read_back, wanted in (whole, less, none):
        assert read_back == wanted, lines
    assert len(whole[0]) == 1
    assert whole[0][0].split()[1:] == ["rbps=5242880", "wbps=6291456", "riops=3000", "wiops=4000"]
    assert less[0][0].split()[1:] == ["rbps=max", "wbps=max", "riops=max", "wiops=9"]
    assert none[0] == []
    assert other == 77
    assert empty == ""


def test_limits_of_absent_device_are_removed_without_error(answer: Any) -> None:
    assert answer["absent"] == ["ENODEV"]


def test_limits_apply_to_child_groups_and_page_cache(answer: Any) -> None:
    """Also through the page cache: cgroup v2 attributes writeback to the group that wrote the pages."""
    assert set(answer["race"]) == set(io_max_in_guest.KINDS)
    assert all(each >= 10 * io_max_in_guest.OPERATIONS for each in answer["race"].values())
