"""Snapshots, restores and clones on every kind of pool; kill -9 and a full disk before each of their system calls."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from crust.blockdriver.records import models
from crust.blockdriver.snapshots.freezer import Member
from crust.core import errors, operations
from crust.host.block import devices
from crust.host.filesystems import log_replay, superblocks
from crust.host.mounts import mount_api
from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers.block_driver import MIB, Bench, Mode, block, caller, mount
from tests.support.drivers.pools import bench_on
from tests.support.faults.crashes import at_call, crash_points, failure_points
from tests.support.frozen import is_frozen
from tests.support.raised import raised
from tests.support.records import pool_layout
from tests.support.records.copies import (
    down,
    in_use,
    made_of,
    pool_type,
    records,
    up,
    write,
)

pytestmark = pytest.mark.root


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


async def test_snapshot_of_raw_volume_in_use_is_refused_without_reflinks(copying: Bench) -> None:
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


async def test_attach_on_btrfs_is_buffered_so_clones_have_few_extents(pool: Bench) -> None:
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


DATA = b"every byte" * 1000


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """No sync: thousands are made here, and none has to survive a power cut."""
    with tempfile.TemporaryDirectory(prefix="crust-", dir="/dev/shm") as name:
        yield Path(name)


class Scene:
    """Two volumes with data, mounted or not, and what may be left of copying them."""

    def __init__(self, bench: Bench, *, mounted: bool) -> None:
        self.bench = bench
        self.mounted = mounted
        self.volumes: list[str] = []
        self.targets: list[str] = []

    async def set(self) -> None:
        """Bring the volumes up, and down again if they are not to be mounted."""
        for name in ("one", "two"):
            volume = await self.bench.create(name)
            target = await up(self.bench, volume.volume_id)
            write(target, "file", DATA)
            self.volumes.append(volume.volume_id)
            if self.mounted:
                self.targets.append(target)
            else:
                await down(self.bench, volume.volume_id)

    async def clear(self) -> None:
        for volume_id in self.volumes:
            await down(self.bench, volume_id)

    def window(self, act: Callable[["Scene"], Coroutine[Any, Any, None]]) -> range:
        """The calls of `act` from before the first freeze to after the last thaw, when it runs undisturbed."""
        self.bench.restart()
        freezer = self.bench.driver.controller.snapshots.freezer
        frozen, marks = freezer.frozen, []

        @asynccontextmanager
        async def marked(members: Sequence[Member]) -> AsyncIterator[None]:
            marks.append(count())
            async with frozen(members):
                yield
            marks.append(count())

        with at_call(-1, lambda _: None) as count, pytest.MonkeyPatch.context() as patched:
            patched.setattr(freezer, "frozen", marked)
            asyncio.run(act(self))
        assert marks[-1] - marks[0] > 5
        return range(marks[0], marks[-1] + 1)

    def points(self, act: Callable[["Scene"], Coroutine[Any, Any, None]]) -> range:
        """Where to cut `act` short."""
        return self.window(act) if self.mounted else range(1000)

    async def take(self) -> None:
        """A snapshot, restored and removed again."""
        taken = await self.bench.co.snapshot(self.volumes[0])
        restored = await made_of(self.bench, "restored", snapshot_id=taken.snapshot_id)
        await self.look_into(restored.volume_id)
        await self.bench.delete(restored.volume_id)
        await self.bench.co.delete_snapshot(taken.snapshot_id)

    async def take_group(self) -> None:
        taken = await self.bench.co.group(*self.volumes)
        await self.bench.co.delete_group(taken)

    async def clone(self) -> None:
        clone = await made_of(self.bench, "clone", volume_id=self.volumes[1])
        await self.look_into(clone.volume_id)
        await self.bench.delete(clone.volume_id)

    async def look_into(self, volume_id: str) -> None:
        """By its superblock: mounting at every point would take minutes."""
        assert superblocks.read(str(self.bench.image(volume_id)), "ext4").complete

    def check(self) -> None:
        """Nothing is left frozen, temporary or incomplete."""
        assert not any(is_frozen(target) for target in self.targets)
        pool = self.bench.root / "state"
        assert pool_layout.files(pool) == pool_layout.files_of(pool, self.volumes)
        assert list((self.bench.root / "run" / "freezes").iterdir()) == []


ACTS: dict[str, Callable[[Scene], Coroutine[Any, Any, None]]] = {
    "snapshot": Scene.take,
    "group": Scene.take_group,
    "clone": Scene.clone,
}


@pytest.mark.parametrize("mounted", [False, True], ids=["idle", "mounted"])
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize(("pool_type", "is_killed"), [("ext4", True), ("xfs", False)])
def test_copy_killed_or_on_a_full_disk_leaves_nothing_frozen(
    in_memory: Path, pool_type: str, act: str, *, is_killed: bool, mounted: bool
) -> None:
    with bench_on(pool_type, in_memory) as bench:
        scene, points = Scene(bench, mounted=mounted), 0
        asyncio.run(scene.set())
        cuts: Any = crash_points if is_killed else failure_points
        for cut in cuts(
            lambda _: bench.restart(),
            lambda _: asyncio.run(ACTS[act](scene)),
            within=scene.points(ACTS[act]),
        ):
            if is_killed:
                bench.restart()
            else:
                assert isinstance(cut[1], errors.CrustError), cut
            assert not any(is_frozen(target) for target in scene.targets)
            asyncio.run(ACTS[act](scene))
            if is_killed:
                scene.check()
            points += 1
        bench.restart()
        scene.check()
        assert points > (5 if mounted else 20)
        asyncio.run(scene.clear())


@pytest.mark.parametrize(("fs_type", "size"), [("ext4", 64), ("xfs", 320), ("btrfs", 256)])
async def test_reading_guest_mounts_a_snapshot_of_used_volume(
    copying: Bench, tmp_path: Path, fs_type: str, size: int
) -> None:
    """A freeze leaves the log of an xfs to be replayed, which a read-only device does not take."""
    source, target = await in_use(copying, "source", mount(fs_type), size=size * MIB)
    write(target, "file", b"x")
    snapshot = await copying.co.snapshot(source)
    made = await made_of(
        copying, "reader", snapshot_id=snapshot.snapshot_id, fs_type=fs_type, size=size * MIB
    )
    reader = mount(fs_type, mode=Mode.SINGLE_NODE_READER_ONLY)
    await copying.stage(made.volume_id, reader)
    target = copying.target(made.volume_id)
    await copying.publish(made.volume_id, target, reader, readonly=True, deferred=True)
    device = copying.host_device(made.volume_id).path
    assert not log_replay.is_due(device, fs_type)
    devices.set_readonly(device, readonly=True)
    (tmp_path / "guest").mkdir()
    options = ("nouuid",) if fs_type == "xfs" else ()
    guest = str(tmp_path / "guest")
    mount_api.mount_device(device, guest, fs_type, options, readonly=True, beside_writers=False)
    try:
        assert Path(guest, "file").read_bytes() == b"x"
    finally:
        mount_api.unmount(guest)
        devices.set_readonly(device, readonly=False)
