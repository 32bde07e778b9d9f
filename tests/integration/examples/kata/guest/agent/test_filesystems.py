"""Growth by the agent's own calls, on this host's kernel."""

import os
import subprocess
from pathlib import Path

import pytest

from crust.host.block import loop
from crust.host.mounts import mount_api
from examples.kata.guest.agent import filesystems
from tests.integration.conftest import MakeDevice
from tests.support.co import MIB

pytestmark = pytest.mark.root


@pytest.mark.parametrize(("before", "after"), [(128, 128), (128, 300), (256, 320)])
def test_btrfs_that_fills_its_disk_is_left_and_others_grow(
    device: MakeDevice, tmp_path: Path, before: int, after: int
) -> None:
    """The kernel refuses to resize a btrfs below 256 MiB, also to the size that it has."""
    made = device(size_bytes=before * MIB)
    subprocess.run(["mkfs.btrfs", "-q", made.path], check=True, capture_output=True)
    os.truncate(made.backing, after * MIB)
    loop.refresh_size(made)
    mount_api.mount_device(made.path, str(tmp_path), "btrfs")
    try:
        filesystems.grow(str(tmp_path), "btrfs", after * MIB)
        total_bytes = filesystems.usage(str(tmp_path))["total_bytes"]
    finally:
        mount_api.unmount(str(tmp_path))
    assert total_bytes == after * MIB
