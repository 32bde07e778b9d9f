"""Snapshots, restores and clones on every kind of pool, verified byte by byte."""

import hashlib
import os
from pathlib import Path

import pytest

from crust.blockdriver.records import models
from crust.core import errors, operations
from crust.host.filesystems import growth
from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers.block_driver import MIB, Bench, block, caller, mount
from tests.support.frozen import is_frozen
from tests.support.raised import raised
from tests.support.records import pool_layout
from tests.support.records.copies import (
    digest,
    down,
    in_use,
    made_of,
    pool_type,
    records,
    up,
    write,
)

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]


@pytest.mark.parametrize(
    ("fs_type", "size"), [("ext4", 64 * MIB), ("xfs", 320 * MIB), ("btrfs", 256 * MIB)]
)
async def test_restored_volume_is_of_its_moment(pool: Bench, fs_type: str, size: int) -> None:
    source, target = await in_use(pool, "source", mount(fs_type), size=size)
    data = os.urandom(8 * MIB)
    write(target, "kept", data)
    taken = await pool.co.snapshot(source)
    assert not is_frozen(target)
    write(target, "kept", b"changed")
    write(target, "later", b"later")

    restored = await made_of(pool, "restored", snapshot_id=taken.snapshot_id, fs_type=fs_type)
    assert restored.content_source.snapshot.snapshot_id == taken.snapshot_id
    assert restored.capacity_bytes == taken.size_bytes == size
    other = await up(pool, restored.volume_id, fs_type)
    assert digest(other, "kept") == hashlib.sha256(data).hexdigest()
    assert not os.path.exists(os.path.join(other, "later"))
    write(other, "kept", b"mine")
    with open(os.path.join(target, "kept"), "rb") as file:
        assert file.read() == b"changed"
    await down(pool, restored.volume_id)
    await down(pool, source)
    await pool.delete(source)

    again = await made_of(pool, "again", snapshot_id=taken.snapshot_id, fs_type=fs_type)
    third = await up(pool, again.volume_id, fs_type)
    assert digest(third, "kept") == hashlib.sha256(data).hexdigest()
    await down(pool, again.volume_id)
    await pool.co.delete_snapshot(taken.snapshot_id)
    await pool.co.delete_snapshot(taken.snapshot_id)


@pytest.mark.parametrize(
    ("fs_type", "size"), [("ext4", 64 * MIB), ("xfs", 320 * MIB), ("btrfs", 256 * MIB)]
)
async def test_clone_in_use_is_independent(pool: Bench, fs_type: str, size: int) -> None:
    source, target = await in_use(pool, "source", mount(fs_type), size=size)
    data = os.urandom(4 * MIB)
    write(target, "kept", data)
    clone = await made_of(pool, "clone", volume_id=source, size=2 * size, fs_type=fs_type)
    assert clone.content_source.volume.volume_id == source
    other = await up(pool, clone.volume_id, fs_type)
    assert digest(other, "kept") == hashlib.sha256(data).hexdigest()
    stats = await pool.stats(clone.volume_id, other)
    grows = not growth.obstacle(
        fs_type
    )  # root of a container may not grow an ext4: then it is reported
    assert (stats.usage[0].total > 1.5 * size) == grows
    assert stats.condition is not None
    assert stats.condition.abnormal == (not grows)
    second = await made_of(pool, "second", volume_id=clone.volume_id, fs_type=fs_type)
    third = await up(pool, second.volume_id, fs_type)
    assert digest(third, "kept") == hashlib.sha256(data).hexdigest()
    for volume_id in (second.volume_id, clone.volume_id, source):
        await down(pool, volume_id)
        await pool.delete(volume_id)


async def test_snapshot_of_a_raw_volume_includes_unwritten_page_cache(cloning: Bench) -> None:
    source, target = await in_use(cloning, "source", block())
    fd = os.open(target, os.O_WRONLY)
    os.pwrite(fd, b"only in the page cache", 5 * MIB)
    taken = await cloning.co.snapshot(source)
    os.close(fd)
    restored = await made_of(cloning, "restored", snapshot_id=taken.snapshot_id, raw=True)
    other = await up(cloning, restored.volume_id, raw=True)
    with open(other, "rb") as file:
        file.seek(5 * MIB)
        assert file.read(22) == b"only in the page cache"


async def test_snapshot_of_a_raw_volume_in_use_is_refused_without_reflinks(copying: Bench) -> None:
    source, _ = await in_use(copying, "source", block())
    with raised("RawDeviceInUse"):
        await copying.co.snapshot(source)
    with raised("RawDeviceInUse"):
        await made_of(copying, "clone", volume_id=source, raw=True)
    assert records(copying) == {source}, "a refused clone keeps its reservation"
    await down(copying, source)
    await copying.co.snapshot(source)


async def test_snapshot_of_a_volume_in_an_unreachable_guest_is_refused(cloning: Bench) -> None:
    source = await cloning.create("source")
    await cloning.up(source.volume_id, cloning.target("pod"), deferred=True)
    with pytest.raises(errors.NotReady, match="runtime_socket"):
        await cloning.co.snapshot(source.volume_id)
    with pytest.raises(errors.NotReady, match="runtime_socket"):
        await made_of(cloning, "clone", volume_id=source.volume_id)
    assert records(cloning) == {source.volume_id}
    await cloning.unpublish(source.volume_id, cloning.target("pod"))
    await cloning.co.snapshot(source.volume_id)


async def test_copy_on_ext4_keeps_the_holes(copying: Bench) -> None:
    source, _ = await in_use(copying, "source", size=1024 * MIB)
    taken = await copying.co.snapshot(source)
    copy = pool_layout.snapshot_image(copying.root / "state", taken.snapshot_id)
    assert copy.stat().st_size == 1024 * MIB
    assert copy.stat().st_blocks * 512 < 128 * MIB
    assert copy.stat().st_mode & 0o777 == 0o400


async def test_attach_on_btrfs_is_buffered_so_that_clones_have_few_extents(pool: Bench) -> None:
    """With direct I/O every request left an extent there, and a clone of 2 GiB took four times that of 100 MiB."""
    volume_id, _ = await in_use(pool, "one", block())
    name = os.path.basename(pool.host_device(volume_id).path)
    on_btrfs = pool_type(pool) == "btrfs"
    assert Path(f"/sys/block/{name}/loop/dio").read_text().strip() == ("0" if on_btrfs else "1")


async def test_restored_volume_is_known_after_its_snapshot_was_deleted(cloning: Bench) -> None:
    one = await cloning.create("one")
    taken = await cloning.co.snapshot(one.volume_id)
    made = await made_of(cloning, "a", snapshot_id=taken.snapshot_id)
    await cloning.co.delete_snapshot(taken.snapshot_id)
    assert await made_of(cloning, "a", snapshot_id=taken.snapshot_id) == made
    with pytest.raises(models.VolumeNotFound):
        await made_of(cloning, "b", volume_id=cloning.ids.volume_id("b"))
    request = csi_pb2.CreateSnapshotRequest(
        source_volume_id=one.volume_id, name="p", parameters={"x": "y"}
    )
    with raised("UnknownSnapshotParameter"):
        await cloning.driver.controller.CreateSnapshot(request, caller())


async def test_create_from_a_source_with_another_filesystem_is_refused(cloning: Bench) -> None:
    source, _ = await in_use(cloning, "source", size=320 * MIB)
    taken = await cloning.co.snapshot(source)
    with raised("SourceFilesystemDiffers"):
        await made_of(cloning, "a", snapshot_id=taken.snapshot_id, fs_type="xfs")
    made = await made_of(cloning, "b", snapshot_id=taken.snapshot_id, fs_type="")
    await up(cloning, made.volume_id, "")


async def test_snapshot_during_another_operation_of_the_volume_is_aborted(cloning: Bench) -> None:
    source = await cloning.create("source")
    running = cloning.driver.stores.running
    key = cloning.ids.volume_id("source")
    with running.shared(key), pytest.raises(operations.OperationInProgress):
        await cloning.co.snapshot(source.volume_id)
    await cloning.co.snapshot(source.volume_id)
