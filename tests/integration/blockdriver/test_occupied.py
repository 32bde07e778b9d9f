"""What the images occupy is counted again only where it may have changed, and is the right number all the same."""

import os
from pathlib import Path

import pytest

from crust import volumes
from crust.host.files import owned
from crust.host.filesystems import filesystems
from crust.wire.csi.v1 import csi_pb2
from tests.support import pools
from tests.support.block_driver import MIB, Bench, caller

pytestmark = pytest.mark.root


def counted(bench: Bench) -> dict[volumes.VolumeId, int]:
    """Every image, looked at now."""
    images = (bench.root / "state" / "images").glob("*.img")
    found = {volumes.VolumeId(each.stem): owned.owned(str(each)).size_bytes for each in images}
    return {volume_id: size for volume_id, size in found.items() if size}


def check(bench: Bench) -> None:
    # xfs gives blocks back in the background; a freeze waits until it has.
    pool = str(bench.root)
    filesystems.freeze(pool)
    filesystems.thaw(pool)
    assert bench.driver.state.backend.occupied() == counted(bench)


def write(target: str) -> None:
    with open(f"{target}/data", "ab") as file:
        file.write(os.urandom(2 * MIB))
        os.fsync(file.fileno())


async def snapshot(bench: Bench, volume_id: str) -> str:
    request = csi_pb2.CreateSnapshotRequest(source_volume_id=volume_id, name="s")
    return (await bench.driver.controller.CreateSnapshot(request, caller())).snapshot.snapshot_id


@pytest.mark.parametrize("fs_type", ["xfs", "ext4"])
async def test_it_is_the_same_number_after_whatever_changed_an_image(
    tmp_path: Path, fs_type: str
) -> None:
    with pools.bench_on(fs_type, tmp_path) as bench:
        volume_id, target = (await bench.create("a")).volume_id, bench.target("a")
        check(bench)
        await bench.stage(volume_id)
        await bench.publish(volume_id, target)
        write(target)
        check(bench)
        write(target)
        snapshot_id = await snapshot(bench, volume_id)
        check(bench)
        write(target)
        await bench.unpublish(volume_id, target)
        await bench.unstage(volume_id)
        check(bench)
        await bench.grow(volume_id, 128 * MIB)
        check(bench)
        request = csi_pb2.DeleteSnapshotRequest(snapshot_id=snapshot_id)
        await bench.driver.controller.DeleteSnapshot(request, caller())
        check(bench)
        assert counted(bench)[volumes.VolumeId(volume_id)] >= 6 * MIB
        await bench.delete(volume_id)
        check(bench)
        assert counted(bench) == {}
