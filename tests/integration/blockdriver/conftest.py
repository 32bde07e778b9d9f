"""A block driver per test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from crust.host.block import loop, loop_devices
from crust.host.mounts import mount_api, mountinfo
from tests.support.block_driver import Bench
from tests.support.pools import bench_on


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A driver on a directory of its own; what a failed test left attached or mounted is removed."""
    made = Bench(tmp_path)
    yield made
    for mount in sorted(mountinfo.below(str(tmp_path)), key=lambda each: -len(each.target)):
        mount_api.unmount(mount.target)
    for device in loop_devices.list_all():
        if device.backing.startswith(f"{tmp_path}/"):
            loop.detach(device)


@pytest.fixture(params=["ext4", "xfs", "btrfs"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    with bench_on(request.param, tmp_path) as bench:
        yield bench


@pytest.fixture(params=["xfs", "btrfs"])
def cloning(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    with bench_on(request.param, tmp_path) as bench:
        yield bench


@pytest.fixture
def copying(tmp_path: Path) -> Iterator[Bench]:
    with bench_on("ext4", tmp_path) as bench:
        yield bench
