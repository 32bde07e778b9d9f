"""Copies of sources that are damaged, have changed, or are written to unseen: refused, or correct."""

import asyncio
import os
import subprocess
import threading

import pytest

from crust.blockdriver.engines import protocol
from crust.blockdriver.engines.files.pool import PoolIdentityUnreadable
from crust.blockdriver.engines.files.provisioning import NewFileVolume
from crust.blockdriver.host import file_copy
from crust.blockdriver.records import models
from crust.core import errors, operations
from crust.host.block import devices
from crust.host.mounts import mount_api
from tests.integration.blockdriver.conftest import benches_on
from tests.support.drivers.block_driver import MIB, Bench, block, mount
from tests.support.frozen import is_frozen
from tests.support.raised import raised
from tests.support.records import pool_layout
from tests.support.records.copies import (
    down,
    in_use,
    left_frozen,
    made_of,
    unmount_lazily,
    up,
    write,
)

pytestmark = pytest.mark.root


pool = benches_on("ext4", "xfs")
on_btrfs = benches_on("btrfs")


async def test_copy_of_a_truncated_image_is_refused(pool: Bench) -> None:
    source = await pool.create("source")
    os.truncate(pool.image(source.volume_id), 10 * MIB)
    with raised("SourceTooShort"):
        await pool.co.snapshot(source.volume_id)
    with raised("SourceTooShort"):
        await made_of(pool, "clone", volume_id=source.volume_id)
    assert not pool.image(pool.ids.volume_id("clone")).exists()


async def test_clone_retry_has_what_its_source_has_by_then(
    pool: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size, its filesystem; and none is made of a source that was deleted."""
    source = (await pool.create("source", block(), size=320 * MIB)).volume_id

    def refuse(*_: object, **__: object) -> None:
        raise errors.NotReady("not now")

    for name in ("clone", "late"):
        with monkeypatch.context() as patched:
            patched.setattr(NewFileVolume, "clone", refuse)
            with pytest.raises(errors.NotReady, match="not now"):
                await made_of(pool, name, volume_id=source)
    await pool.stage(source, mount("xfs"))
    await pool.unstage(source)
    await pool.grow(source, 384 * MIB)
    with raised("SmallerThanSource"):
        await made_of(pool, "clone", volume_id=source, size=320 * MIB, fs_type="xfs")
    with raised("SourceFilesystemDiffers"):
        await made_of(pool, "clone", volume_id=source)
    clone = await made_of(pool, "clone", volume_id=source, fs_type="xfs")
    assert clone.capacity_bytes == pool.image(clone.volume_id).stat().st_size == 384 * MIB
    await pool.delete(source)
    with pytest.raises(models.VolumeNotFound):
        await made_of(pool, "late", volume_id=source)
    assert pool.driver.stores.volume_records.index.page() == (clone.volume_id,)


async def test_copy_after_lazy_unmount_with_a_writer_is_refused(pool: Bench) -> None:
    source, target = await in_use(pool, "source")
    with open(os.path.join(target, "file"), "wb") as file:
        file.write(b"x")
        unmount_lazily(target)
        with raised("BusyAfterLazyUnmount"):
            await pool.co.snapshot(source)
        with raised("BusyAfterLazyUnmount"):
            await made_of(pool, "clone", volume_id=source)
    await pool.co.snapshot(source)
    await down(pool, source)


async def test_copy_of_raw_volume_with_lost_publish_is_refused(pool: Bench) -> None:
    """Its node state is lost: the kernel still shows the bind, through which a pod writes."""
    source, target = await in_use(pool, "raw", block())
    pool.lose_publishes()
    await asyncio.to_thread(pool.restart)
    if pool.driver.stores.provisioning.copies_at_once():
        await pool.co.snapshot(source)
    else:
        with raised("RawDeviceInUse", match=target):
            await pool.co.snapshot(source)
    mount_api.unmount(target)
    await pool.co.snapshot(source, "second")
    await pool.unstage(source)


async def test_copy_of_a_volume_published_read_only_succeeds(pool: Bench) -> None:
    """Its device is held exclusively, and nothing writes to it."""
    source = await pool.create("source")
    target = await up(pool, source.volume_id)
    write(target, "file", b"x")
    await down(pool, source.volume_id)
    await pool.up(source.volume_id, target, readonly=True)
    await pool.co.snapshot(source.volume_id)
    await pool.unpublish(source.volume_id, target)
    await pool.publish(source.volume_id, target, readonly=True, deferred=True)
    hold = devices.open_exclusive(pool.host_device(source.volume_id).path)
    await pool.co.snapshot(source.volume_id, "second")
    os.close(hold)
    await down(pool, source.volume_id)


async def test_recovery_thaws_a_filesystem_covered_by_another_mount(pool: Bench) -> None:
    source, target = await in_use(pool, "source")
    entry = left_frozen(pool, source, target)
    cover = ["mount", "-t", "tmpfs", "none", target]
    await asyncio.to_thread(subprocess.run, cover, check=True)
    await asyncio.to_thread(pool.restart)
    mount_api.unmount(target)
    assert not is_frozen(target)
    assert not entry.exists()
    await down(pool, source)


async def test_recovery_thaws_even_if_the_driver_cannot_start(pool: Bench) -> None:
    source, target = await in_use(pool, "source")
    left_frozen(pool, source, target)
    (pool.root / "run" / "freezes" / "unreadable").mkdir()
    identity = pool.root / "state" / "pool.json"
    kept = identity.read_bytes()
    identity.write_bytes(b"{")
    with pytest.raises(PoolIdentityUnreadable):
        await asyncio.to_thread(pool.restart)
    assert not is_frozen(target)
    identity.write_bytes(kept)
    await asyncio.to_thread(pool.restart)
    await down(pool, source)


async def test_copy_of_a_file_that_cannot_be_cloned_is_refused(
    on_btrfs: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others there are cloned at one moment, and all rules count on it. Old kernels refuse one without checksums."""
    source, _ = await in_use(on_btrfs, "source", block())
    assert on_btrfs.driver.stores.provisioning.copies_at_once()
    monkeypatch.setattr(file_copy, "_FICLONE", 0)  # which no file knows
    with raised("FileNotCloneable"):
        await on_btrfs.co.snapshot(source)
    with raised("FileNotCloneable"):
        await made_of(on_btrfs, "clone", volume_id=source, raw=True)
    pool = on_btrfs.root / "state"
    assert pool_layout.files(pool) == pool_layout.files_of(pool, [source])
    await down(on_btrfs, source)


async def test_restore_of_one_snapshot_in_parallel_blocks_its_deletion(
    pool: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await pool.create("source")
    taken = await pool.co.snapshot(source.volume_id)
    both, restore = threading.Barrier(3, timeout=30), NewFileVolume.restore

    def together(making: NewFileVolume, image: protocol.Image, size_bytes: int) -> None:
        both.wait()
        restore(making, image, size_bytes)
        both.wait()

    monkeypatch.setattr(NewFileVolume, "restore", together)
    made = [
        asyncio.create_task(made_of(pool, name, snapshot_id=taken.snapshot_id)) for name in "ab"
    ]
    await asyncio.to_thread(both.wait)
    with pytest.raises(operations.OperationInProgress, match="CreateVolume"):
        await pool.co.delete_snapshot(taken.snapshot_id)
    await asyncio.to_thread(both.wait)
    for restored in await asyncio.gather(*made):
        assert pool.image(restored.volume_id).stat().st_size == 64 * MIB
    await pool.co.delete_snapshot(taken.snapshot_id)
    with raised("SnapshotNotFound"):
        await made_of(pool, "c", snapshot_id=pool.ids.volume_id("c"))


async def test_name_of_interrupted_snapshot_or_group_is_free_again(
    pool: Bench,
) -> None:
    """What a crash has left has no record, and no answer ever named it."""
    one, two, other = [(await pool.create(name)).volume_id for name in ("one", "two", "other")]
    for set_id in (pool.ids.snapshot_id("snap"), pool.ids.group_id("g")):
        half_made = pool.root / "state" / "snapshots" / f".new-{set_id}"
        half_made.mkdir()
        (half_made / "a.snap").touch()
    assert (await pool.co.snapshot(other)).source_volume_id == other
    with raised("SnapshotNameTaken"):
        await pool.co.snapshot(one)
    taken = await pool.co.group(one, other)
    assert {snapshot.source_volume_id for snapshot in taken.snapshots} == {one, other}
    with raised("GroupNameTaken"):
        await pool.co.group(one, two)
