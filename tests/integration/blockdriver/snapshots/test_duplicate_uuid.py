"""A copy has its source's filesystem UUID and is mounted beside it, or is refused."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from crust.host.block import signatures
from crust.host.filesystems import usage
from crust.host.mounts import mountinfo
from tests.integration.blockdriver.snapshots.test_guest_snapshots import Scene
from tests.support.drivers.block_driver import MIB, Bench, mount
from tests.support.drivers.pools import bench_on
from tests.support.raised import raised
from tests.support.records import pool_layout
from tests.support.records.copies import in_use, made_of, snapshot, up, write
from tests.support.runtimes.mounting_guests import MountingGuests

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

SIZES = [("ext4", 64 * MIB), ("xfs", 320 * MIB), ("btrfs", 256 * MIB)]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    guests = MountingGuests()
    with bench_on("xfs", tmp_path, runtime_guests=guests) as bench:
        yield Scene(bench, guests)


def uuid_of(bench: Bench, volume_id: str) -> str:
    image = pool_layout.image(bench.root / "state", volume_id)
    found = signatures.probe(str(image))
    assert isinstance(found, signatures.Filesystem)
    return found.uuid


@pytest.mark.parametrize(("fs_type", "size"), SIZES)
async def test_copies_mount_beside_their_filesystem(scene: Scene, fs_type: str, size: int) -> None:
    bench = scene.bench
    source = await bench.create("source", mount(fs_type), size=size)
    write(await up(bench, source.volume_id, fs_type), "file", b"kept")
    taken = await snapshot(bench, source.volume_id)
    restored = await made_of(bench, "restored", snapshot_id=taken.snapshot_id, fs_type=fs_type)
    clone = await made_of(bench, "clone", volume_id=source.volume_id, fs_type=fs_type)
    second = await made_of(bench, "second", volume_id=clone.volume_id, fs_type=fs_type)
    every = [each.volume_id for each in (source, restored, clone, second)]
    for volume_id in every[1:]:
        target = await up(bench, volume_id, fs_type)
        assert Path(target, "file").read_bytes() == b"kept"
        write(target, "own", volume_id.encode())
    for volume_id in every:  # and in another order: a copy first, its source beside it
        await scene.down(volume_id)
    for volume_id in reversed(every):
        await up(bench, volume_id, fs_type)
    for volume_id in every[1:]:
        assert Path(bench.target(volume_id), "own").read_bytes() == volume_id.encode()
    assert not Path(bench.target(source.volume_id), "own").exists()
    for volume_id in every:
        await scene.down(volume_id)
    assert len({uuid_of(bench, each) for each in every}) == 1


@pytest.mark.parametrize(("fs_type", "size"), SIZES)
async def test_copy_of_a_guests_filesystem_mounts_beside_it_with_the_returned_options(
    scene: Scene, fs_type: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = scene.bench
    source = await bench.create("source", mount(fs_type), size=size)
    write(await scene.up(source.volume_id, fs_type), "file", b"kept")
    clone = await made_of(bench, "clone", volume_id=source.volume_id, fs_type=fs_type)

    def refuse(*_: object, **__: object) -> int:
        raise AssertionError("a guest's filesystem is not mounted on the host")

    target = bench.target(clone.volume_id)
    with monkeypatch.context() as patched:
        patched.setattr("crust.host.filesystems.fsfreeze.open_root", refuse)
        patched.setattr("crust.host.mounts.mount_api.mount_device", refuse)
        await bench.stage(clone.volume_id, mount(fs_type))
        answer = await bench.publish(clone.volume_id, target, mount(fs_type), deferred=True)
    inside = str(bench.root / "beside")
    options = tuple(answer.deferred_mount.mount_options)
    scene.guests.start(target, scene.device(clone.volume_id), inside, fs_type, options)
    assert Path(inside, "file").read_bytes() == b"kept"
    for volume in (clone, source):
        await scene.down(volume.volume_id)


async def test_btrfs_copy_without_kernel_temporary_fsid_is_refused_beside_its_source(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "_TEMPORARY_FSIDS", "/sys/no/such/feature")
    bench = scene.bench
    source, source_target = await in_use(bench, "source", mount("btrfs"), size=256 * MIB)
    write(source_target, "file", b"kept")
    again = f"{source_target}-again"
    await bench.publish(source, again, mount("btrfs"))
    clone = await made_of(bench, "clone", volume_id=source, fs_type="btrfs")
    target = bench.target(clone.volume_id)
    await bench.stage(clone.volume_id, mount("btrfs"))
    with raised("DuplicateFilesystemUuid", match=r"/dev/loop\d+ is mounted"):
        await bench.publish(clone.volume_id, target, mount("btrfs"))
    assert mountinfo.at(target) is None
    assert not os.path.exists(target)
    await bench.unpublish(source, again)
    await scene.down(source)
    await bench.publish(clone.volume_id, target, mount("btrfs"))
    assert Path(target, "file").read_bytes() == b"kept"
    await scene.down(clone.volume_id)
