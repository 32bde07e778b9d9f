"""Snapshots, clones and groups of volumes that a guest writes, on every kind of pool, verified byte by byte."""

import hashlib
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from crust.blockdriver.engines import protocol
from crust.blockdriver.engines.files.provisioning import NewFileSnapshotSet, NewFileVolume
from crust.blockdriver.host import fsfreeze
from crust.blockdriver.snapshots import host_freeze
from crust.core import volumes
from crust.host.block import devices, holders
from tests.support.drivers.block_driver import MIB, Bench, mount
from tests.support.drivers.pools import bench_on
from tests.support.frozen import is_frozen
from tests.support.raised import raised
from tests.support.records import pool_layout
from tests.support.records.copies import digest, down, made_of, up, write
from tests.support.runtimes.mounting_guests import MountingGuests

pytestmark = pytest.mark.root

FILESYSTEMS = [("ext4", 64 * MIB), ("xfs", 320 * MIB), ("btrfs", 256 * MIB)]


@dataclass
class Scene:
    """A driver, and guests that have its volumes."""

    bench: Bench
    guests: MountingGuests

    async def hand_over(self, volume_id: str, fs_type: str = "ext4") -> str:
        """Stage and publish with deferral; answers the target."""
        target = self.bench.target(volume_id)
        await self.bench.up(volume_id, target, mount(fs_type), deferred=True)
        return target

    async def up(self, volume_id: str, fs_type: str = "ext4") -> str:
        """Have a guest mount the volume; answers where its files are."""
        target = await self.hand_over(volume_id, fs_type)
        self.start(volume_id, fs_type)
        return self.guests.mounted[target]

    def start(self, volume_id: str, fs_type: str = "ext4") -> None:
        """A sandbox takes what was handed over."""
        inside = str(self.bench.root / f"guest-{volume_id}")
        self.guests.start(
            self.bench.target(volume_id), self.bench.host_device(volume_id).path, inside, fs_type
        )

    async def down(self, volume_id: str) -> None:
        target = self.bench.target(volume_id)
        if target in self.guests.mounted:
            self.guests.stop(target)
        await down(self.bench, volume_id)

    def left(self) -> list[str]:
        """What a failed copy must not leave."""
        folders = ("state/snapshots", "run/freezes")
        names = [path.name for folder in folders for path in (self.bench.root / folder).iterdir()]
        return [*names, *pool_layout.snapshot_images(self.bench.root / "state")]


def scenes_on(*fs_types: str) -> Callable[..., Iterator[Scene]]:
    """A fixture: a scene whose pool is on each of these filesystems in turn."""

    @pytest.fixture(params=fs_types)
    def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
        guests = MountingGuests()
        with bench_on(request.param, tmp_path, runtime_guests=guests) as bench:
            yield Scene(bench, guests)

    return scene


scene = scenes_on("ext4", "xfs", "btrfs")
on_xfs = scenes_on("xfs")


@pytest.mark.parametrize(("fs_type", "size"), FILESYSTEMS)
async def test_snapshot_and_clone_contain_what_a_guest_wrote(
    scene: Scene, fs_type: str, size: int
) -> None:
    bench = scene.bench
    source = await bench.create("source", mount(fs_type), size=size)
    inside = await scene.up(source.volume_id, fs_type)
    data = os.urandom(8 * MIB)
    write(inside, "kept", data)
    taken = await bench.co.snapshot(source.volume_id)
    write(inside, "later", b"later")
    clone = await made_of(bench, "clone", volume_id=source.volume_id, fs_type=fs_type)
    restored = await made_of(bench, "restored", snapshot_id=taken.snapshot_id, fs_type=fs_type)
    assert not scene.guests.is_frozen(bench.target(source.volume_id))
    has_later = []
    for volume in (restored, clone):
        target = await up(bench, volume.volume_id, fs_type)
        assert digest(target, "kept") == hashlib.sha256(data).hexdigest()
        has_later.append(os.path.exists(os.path.join(target, "later")))
        await down(bench, volume.volume_id)
    assert has_later == [False, True]
    await scene.down(source.volume_id)


async def test_copy_of_a_guests_ext4_needs_no_journal_replay(scene: Scene) -> None:
    """Frozen, the journal is empty: the check of a copy finds nothing to do."""
    source = await scene.bench.create("source")
    inside = await scene.up(source.volume_id)
    write(inside, "kept", b"kept" * 1000)
    taken = await scene.bench.co.snapshot(source.volume_id)
    image = pool_layout.snapshot_image(scene.bench.root / "state", taken.snapshot_id)
    assert "needs_recovery" not in output_of("dumpe2fs", "-h", str(image))
    output_of("e2fsck", "-fn", str(image))
    await scene.down(source.volume_id)


async def test_group_on_guest_and_host_is_frozen_before_first_copy(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = scene.bench
    ids = [(await bench.create(name)).volume_id for name in ("one", "two", "three")]
    inside = [await scene.up(volume_id) for volume_id in ids[:2]]
    mounted_at = [*inside, await up(bench, ids[2])]
    for path, volume_id in zip(mounted_at, ids, strict=True):
        write(path, "file", volume_id.encode())
    take, seen = NewFileSnapshotSet.take, []

    def looking(self: NewFileSnapshotSet, image: protocol.Image) -> None:
        seen.append([is_frozen(path) for path in mounted_at])
        take(self, image)

    monkeypatch.setattr(NewFileSnapshotSet, "take", looking)
    with raised("SameVolumeTwice"):
        await bench.co.group(ids[0], ids[0])
    taken = await bench.co.group(*ids)
    assert seen == [[True] * 3] * 3
    assert not any(is_frozen(path) for path in mounted_at)
    assert await bench.co.group(*reversed(ids)) == taken
    assert {snapshot.source_volume_id for snapshot in taken.snapshots} == set(ids)
    for snapshot in taken.snapshots:
        assert snapshot.group_snapshot_id == taken.group_snapshot_id
        name = f"of-{snapshot.source_volume_id}"
        restored = await made_of(bench, name, snapshot_id=snapshot.snapshot_id)
        target = await up(bench, restored.volume_id)
        assert Path(target, "file").read_bytes() == snapshot.source_volume_id.encode()
        await down(bench, restored.volume_id)
    for volume_id in ids:
        await scene.down(volume_id)


def output_of(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Have `act` happen while an image is copied."""
    take, clone = NewFileSnapshotSet.take, NewFileVolume.clone

    def taking(self: NewFileSnapshotSet, image: protocol.Image) -> None:
        take(self, image)
        act()

    def cloning(making: NewFileVolume, source: volumes.VolumeId, **sizes: int) -> None:
        clone(making, source, **sizes)
        act()

    monkeypatch.setattr(NewFileSnapshotSet, "take", taking)
    monkeypatch.setattr(NewFileVolume, "clone", cloning)


async def test_copy_of_a_guest_that_thawed_early_is_discarded(
    on_xfs: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = on_xfs.bench
    source = await bench.create("source")
    other = await bench.create("other")
    inside = await on_xfs.up(source.volume_id)
    with monkeypatch.context() as patched:
        meanwhile(patched, lambda: fsfreeze.thaw(inside))
        with pytest.raises(host_freeze.ThawedEarly):
            await bench.co.snapshot(source.volume_id)
        with pytest.raises(host_freeze.ThawedEarly):
            await bench.co.group(source.volume_id, other.volume_id)
        assert on_xfs.left() == []
        with pytest.raises(host_freeze.ThawedEarly):
            await made_of(bench, "clone", volume_id=source.volume_id)
    write(inside, "later", b"later")
    await bench.co.snapshot(source.volume_id)
    clone = await made_of(bench, "clone", volume_id=source.volume_id)
    target = await up(bench, clone.volume_id)
    assert Path(target, "later").read_bytes() == b"later"
    await down(bench, clone.volume_id)
    await on_xfs.down(source.volume_id)


async def test_exclusive_open_of_a_device_during_its_copy_is_refused(
    on_xfs: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = on_xfs.bench
    source = await bench.create("source")
    await on_xfs.hand_over(source.volume_id)
    device, seen = on_xfs.bench.host_device(source.volume_id).path, []

    def begin() -> None:
        try:
            os.close(devices.open_exclusive(device))
        except holders.DeviceInUse as err:
            seen.append(err)

    meanwhile(monkeypatch, begin)
    await bench.co.snapshot(source.volume_id)
    assert len(seen) == 1
    on_xfs.start(source.volume_id)
    await on_xfs.down(source.volume_id)


async def test_copy_of_volume_that_a_lost_guest_writes_is_refused(on_xfs: Scene) -> None:
    """No sandbox has it, by its claims; a virtual machine without its runtime has the device open plainly."""
    bench = on_xfs.bench
    source = await bench.create("source")
    await on_xfs.hand_over(source.volume_id)
    with (
        open(bench.host_device(source.volume_id).path, "r+b", buffering=0),
        raised("SandboxStarting", match=rf"\[{os.getpid()}\]"),
    ):
        await bench.co.snapshot(source.volume_id)
    assert on_xfs.left() == []
    await bench.co.snapshot(source.volume_id)
    await on_xfs.down(source.volume_id)


async def test_copy_of_a_device_held_by_another_process_is_refused(on_xfs: Scene) -> None:
    """A sandbox that begins: it has taken the device and has not mounted it yet."""
    bench = on_xfs.bench
    source = await bench.create("source")
    await on_xfs.hand_over(source.volume_id)
    hold = devices.open_exclusive(on_xfs.bench.host_device(source.volume_id).path)
    with raised("SandboxStarting"):
        await bench.co.snapshot(source.volume_id)
    assert on_xfs.left() == []
    os.close(hold)
    await bench.co.snapshot(source.volume_id)
    await on_xfs.down(source.volume_id)
