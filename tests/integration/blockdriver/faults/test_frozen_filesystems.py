"""What a snapshot froze is thawed, whoever died, and by when; what it left is discarded."""

import asyncio
import errno
import fcntl
import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from crust.blockdriver.engines import protocol
from crust.blockdriver.engines.files.provisioning import NewFileSnapshotSet
from crust.blockdriver.host import fsfreeze
from crust.core import errors
from crust.host.block import devices, holders, signatures
from crust.host.mounts import mountinfo
from crust.host.process import syscalls
from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers.block_driver import MIB, Bench, Mode, caller, is_there, mount
from tests.support.faults import syncs
from tests.support.frozen import freeze, is_frozen, recovered
from tests.support.raised import raised
from tests.support.records import pool_layout, zfs_bytes
from tests.support.records.copies import in_use, left_frozen, made_of, unmount_lazily, up, write

pytestmark = pytest.mark.root

SIZES = [("ext4", 64 * MIB), ("xfs", 320 * MIB)]


@pytest.mark.parametrize(("fs_type", "size"), [*SIZES, ("btrfs", 256 * MIB)])
async def test_start_thaws_a_frozen_filesystem_that_was_unmounted(
    copying: Bench, fs_type: str, size: int
) -> None:
    """It was unmounted lazily: it still has the device, and no path leads to it."""
    source, target = await in_use(copying, "source", mount(fs_type), size=size)
    device, entry = copying.host_device(source).path, left_frozen(copying, source, target)
    unmount_lazily(target)
    with pytest.raises(holders.DeviceInUse):
        os.close(devices.open_exclusive(device))
    await asyncio.to_thread(copying.restart)
    assert not entry.exists()
    os.close(devices.open_exclusive(device))
    assert await up(copying, source, fs_type) == target
    write(target, "after", b"x")


def _write_partition_table(device: str) -> None:
    """One partition, in the bytes that ext4 leaves to a boot loader."""
    with open(device, "r+b") as file:
        file.seek(446)
        file.write(struct.pack("<4s4sII", b"\0\2\0\0", b"\x83\2\0\0", 2048, 8192))
        file.seek(510)
        file.write(b"\x55\xaa")
        os.fsync(file.fileno())


@pytest.mark.parametrize(
    ("write_bytes", "kind"),
    [(zfs_bytes.write, signatures.Ambiguous), (_write_partition_table, signatures.Other)],
    ids=["zfs", "partition table"],
)
async def test_start_thaws_a_filesystem_beside_another_formats_bytes(
    copying: Bench, write_bytes: Callable[[str], None], kind: type[signatures.Signature]
) -> None:
    """It was unmounted lazily, and a probe does not name its type."""
    source, target = await in_use(copying, "source", mount("ext4"), size=64 * MIB)
    device = copying.host_device(source).path
    await asyncio.to_thread(write_bytes, device)
    assert isinstance(await asyncio.to_thread(signatures.probe, device), kind)
    entry = left_frozen(copying, source, target)
    unmount_lazily(target)
    await asyncio.to_thread(copying.restart)
    assert not entry.exists()
    os.close(devices.open_exclusive(device))


async def test_start_drops_a_freeze_of_a_removed_volume(copying: Bench) -> None:
    source = await copying.create("source")
    await up(copying, source.volume_id)
    device = copying.host_device(source.volume_id)
    entry = copying.root / "run" / "freezes" / source.volume_id
    await copying.unpublish(source.volume_id, copying.target(source.volume_id))
    for absent in (device.identity, "7:1000000@1", "nonsense"):
        entry.write_text(f"{syscalls.boot_id()} {absent}\n")
        entry.chmod(0o600)
        await asyncio.to_thread(copying.restart)
        assert not entry.exists()


async def test_snapshot_that_takes_too_long_is_thawed_and_fails(
    copying: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = await in_use(copying, "source")
    take = NewFileSnapshotSet.take

    def slowly(self: NewFileSnapshotSet, image: protocol.Image) -> None:
        take(self, image)
        # A writer waits until the filesystem is thawed, which only the timer does now.
        write(target, "after", b"x")

    monkeypatch.setattr(copying.driver.controller.snapshots.freezer, "limit_s", 0.2)
    monkeypatch.setattr(NewFileSnapshotSet, "take", slowly)
    with raised("FrozenTooLong"):
        await copying.co.snapshot(source)
    assert not is_frozen(target)
    assert copying.driver.stores.snapshot_sets.index.page() == ()
    assert not pool_layout.snapshot_images(copying.root / "state")


async def test_copy_of_a_filesystem_that_another_program_thaws_is_discarded(
    copying: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = await in_use(copying, "source")
    take = NewFileSnapshotSet.take

    def interrupted(self: NewFileSnapshotSet, image: protocol.Image) -> None:
        take(self, image)
        fsfreeze.thaw(target)
        write(target, "during", b"x")

    with monkeypatch.context() as patched:
        patched.setattr(NewFileSnapshotSet, "take", interrupted)
        with raised("ThawedEarly", match="another program thawed"):
            await copying.co.snapshot(source)
    assert copying.driver.stores.snapshot_sets.index.page() == ()
    assert not pool_layout.snapshot_images(copying.root / "state")
    assert not [*(copying.root / "run" / "freezes").iterdir()]
    await copying.co.snapshot(source)


@contextmanager
def failing_thaws(number: int) -> Iterator[None]:
    """So many thaws fail, as the kernel's writing of a superblock does, and all others are real."""
    left = iter(range(number))

    def before(_: str, arguments: tuple[Any, ...]) -> None:
        if arguments[1] == fsfreeze.FITHAW and next(left, None) is not None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with syncs.watched(("fcntl.ioctl",), before=before):
        yield


def intents(bench: Bench) -> list[str]:
    return os.listdir(bench.root / "run" / "freezes")


async def test_copy_after_a_failed_thaw_thaws_first(copying: Bench) -> None:
    """No other program has frozen the filesystem: the driver says so, and its next copy finds its own freeze."""
    source, target = await in_use(copying, "source")
    for number in (1, 2):
        with failing_thaws(number), raised("StillFrozen", errors.PeerUnavailable, match="EIO"):
            await copying.co.snapshot(source)
        assert (is_frozen(target), intents(copying)) == (True, [source])
        assert copying.driver.stores.snapshot_sets.index.page() == ()
    await copying.co.snapshot(source)
    assert (is_frozen(target), intents(copying)) == (False, [])
    await made_of(copying, "clone", volume_id=source)
    assert (is_frozen(target), intents(copying)) == (False, [])


@pytest.mark.parametrize("is_mounted", [True, False], ids=["mounted", "unmounted"])
async def test_failed_thaw_is_repeated_while_driver_runs(
    copying: Bench, *, is_mounted: bool
) -> None:
    source, target = await in_use(copying, "source")
    freezer = copying.driver.controller.snapshots.freezer
    with failing_thaws(3):
        with raised("StillFrozen"):
            await copying.co.snapshot(source)
        if not is_mounted:
            await copying.unpublish(source, target)
        await recovered(freezer)
        assert intents(copying) == []
    if is_mounted:
        assert not is_frozen(target)
        await copying.unpublish(source, target)
    await copying.unstage(source)


async def test_failed_thaw_at_start_is_repeated_while_driver_runs(copying: Bench) -> None:
    source, target = await in_use(copying, "source")
    left_frozen(copying, source, target)
    with failing_thaws(3):
        await asyncio.to_thread(copying.restart)
        assert is_frozen(target)
        await recovered(copying.driver.controller.snapshots.freezer)
    assert (is_frozen(target), intents(copying)) == (False, [])


async def test_freeze_of_another_program_is_never_thawed(copying: Bench) -> None:
    source, target = await in_use(copying, "source")
    freeze(target)
    for _ in range(2):
        with raised("AlreadyFrozen"):
            await copying.co.snapshot(source)
        with raised("AlreadyFrozen"):
            await made_of(copying, "clone", volume_id=source)
    await asyncio.to_thread(copying.restart)
    assert is_frozen(target)
    fsfreeze.thaw(target)
    await copying.co.snapshot(source)


async def test_snapshot_interrupted_by_a_crash_leaves_nothing(copying: Bench) -> None:
    source = await copying.create("source")
    taken = await copying.co.snapshot(source.volume_id)
    kept = pool_layout.snapshot_set(copying.root / "state", taken.snapshot_id)
    kept.parent.rename(kept.parent.parent / f".new-{taken.snapshot_id}")
    await asyncio.to_thread(copying.restart)
    assert copying.driver.stores.snapshot_sets.find(taken.snapshot_id) is None
    assert not any((copying.root / "state" / "snapshots").iterdir())
    assert (await copying.co.snapshot(source.volume_id)).snapshot_id == taken.snapshot_id
    assert mountinfo.below(str(copying.root / "pods")) == ()


_GOING_DOWN = 0x8004587D  # XFS_IOC_GOINGDOWN and EXT4_IOC_SHUTDOWN
_WITHOUT_LOG = 2


def give_up(mountpoint: str) -> None:
    """Shut the filesystem down, as the kernel does when its log cannot be written."""
    fd = os.open(mountpoint, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _GOING_DOWN, struct.pack("I", _WITHOUT_LOG))
    finally:
        os.close(fd)


@pytest.mark.parametrize(("fs_type", "size"), SIZES)
@pytest.mark.parametrize("restarted", [False, True])
async def test_shut_down_filesystem_is_unhealthy_and_can_be_republished(
    bench: Bench, fs_type: str, size: int, *, restarted: bool
) -> None:
    volume_id, target = await bench.published(capability=mount(fs_type), size=size)
    give_up(target)
    if restarted:
        bench.restart()
    stats = await bench.stats(volume_id, target)
    assert stats.usage[0].total > size / 2
    assert stats.condition is not None
    assert stats.condition.abnormal
    await bench.publish(volume_id, target, mount(fs_type))
    await bench.unpublish(volume_id, target)
    assert mountinfo.below(str(bench.root)) == ()
    assert not is_there(target)
    await bench.unstage(volume_id)
    await bench.up(volume_id, target, mount(fs_type))
    condition = (await bench.stats(volume_id, target)).condition
    assert condition is not None
    assert not condition.abnormal


@pytest.mark.parametrize(("fs_type", "size"), SIZES)
async def test_shut_down_filesystem_in_csi_1_13_is_inaccessible(
    bench: Bench, fs_type: str, size: int
) -> None:
    bench.profile = "1.13"
    bench.restart()
    volume_id, target = await bench.published(capability=mount(fs_type), size=size)
    give_up(target)
    request = csi_pb2.NodeGetVolumeHealthRequest(volume_id=volume_id, volume_publish_path=target)
    answer = await bench.driver.node.NodeGetVolumeHealth(request, caller())
    reported = answer.volume_health.health_statuses
    assert [health.status for health in reported] == [csi_pb2.INACCESSIBLE]


async def test_filesystem_made_read_only_by_the_kernel_is_unhealthy(bench: Bench) -> None:
    volume_id, target = await bench.published()
    for options in ("remount,ro", "remount,bind,rw"):  # the filesystem, as after an error
        await asyncio.to_thread(subprocess.run, ["mount", "-o", options, target], check=True)
    condition = (await bench.stats(volume_id, target)).condition
    assert condition is not None
    assert "read-only" in condition.message
    await bench.unpublish(volume_id, target)
    reader = mount(mode=Mode.SINGLE_NODE_READER_ONLY)
    await bench.publish(volume_id, target, reader, readonly=True)
    bench.lose_publishes()
    bench.restart()
    condition = (await bench.stats(volume_id, target)).condition
    assert condition is not None
    assert not condition.abnormal
