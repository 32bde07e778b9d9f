"""Copies of a filesystem get a UUID of their own, so that they mount beside their source without being told to."""

import os
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from crust.blockdriver.records import volume_records
from crust.blockdriver.records.volume_record import Record
from crust.host.block import devices, signatures
from crust.host.filesystems import btrfs_uuid, uuids
from crust.host.mounts import mount_api, mountinfo
from crust.host.process import commands
from crust.wire.csi.v1 import csi_pb2
from tests.integration.blockdriver.test_snapshots import drop, made_of, snapshot, up, write
from tests.integration.blockdriver.test_snapshots_of_guests import Scene
from tests.support.block_driver import MIB, Bench, mount
from tests.support.mounting_guests import MountingGuests
from tests.support.pools import bench_on

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

RENEWED = [("xfs", 320 * MIB), ("btrfs", 256 * MIB)]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    guests = MountingGuests()
    with bench_on("xfs", tmp_path, runtime_guests=guests) as bench:
        yield Scene(bench, guests)


def uuid_of(bench: Bench, volume_id: str) -> str:
    image = bench.root / "state" / "images" / f"{volume_id}.img"
    found = signatures.probe(str(image))
    assert isinstance(found, signatures.Filesystem)
    return found.uuid


def shares(bench: Bench, volume_id: str) -> bool:
    record = bench.driver.state.volume_records.load(volume_records.volume_id_of(volume_id))
    return record.shares_uuid


def options_at(target: str) -> tuple[str, ...]:
    found = mountinfo.at(target)
    assert found is not None
    return found.super_options


@pytest.mark.parametrize(("fs_type", "size"), RENEWED)
async def test_a_copy_of_a_frozen_filesystem_mounts_beside_its_source_as_another(
    scene: Scene, fs_type: str, size: int
) -> None:
    """Frozen, an xfs leaves its log as one that wants to be replayed."""
    bench = scene.bench
    source = await bench.create("source", mount(fs_type), size=size)
    target = await up(bench, source.volume_id, fs_type)
    write(target, "file", b"kept")
    taken = await snapshot(bench, source.volume_id)
    restored = await made_of(bench, "restored", snapshot_id=taken.snapshot_id, fs_type=fs_type)
    clone = await made_of(bench, "clone", volume_id=source.volume_id, fs_type=fs_type)
    for volume in (restored, clone):
        beside = await up(bench, volume.volume_id, fs_type)
        assert "nouuid" not in options_at(beside)
        assert Path(beside, "file").read_bytes() == b"kept"
    second = await made_of(bench, "second", volume_id=clone.volume_id, fs_type=fs_type)
    assert Path(await up(bench, second.volume_id, fs_type), "file").read_bytes() == b"kept"
    every = (source, restored, clone, second)
    for volume in every:
        await scene.down(volume.volume_id)
    assert len({uuid_of(bench, each.volume_id) for each in every}) == 4
    own = uuid_of(bench, clone.volume_id)
    await up(bench, clone.volume_id, fs_type)
    await scene.down(clone.volume_id)
    assert uuid_of(bench, clone.volume_id) == own


@pytest.mark.parametrize(("fs_type", "size"), [("xfs", 320 * MIB), ("ext4", 64 * MIB)])
async def test_a_copy_of_what_a_guest_wrote_is_not_mounted_here_to_be_renamed(
    scene: Scene, fs_type: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its source's UUID, and is published as such, until a guest has emptied the log."""
    bench = scene.bench
    source = await bench.create("source", mount(fs_type), size=size)
    inside = await scene.up(source.volume_id, fs_type)
    write(inside, "file", b"kept")
    taken = await snapshot(bench, source.volume_id)
    clone = await made_of(bench, "clone", snapshot_id=taken.snapshot_id, fs_type=fs_type)

    def refuse(*_: object) -> int:
        raise AssertionError("a guest's filesystem is not mounted on the host")

    monkeypatch.setattr("crust.host.mounts.detached_mount.open_root", refuse)
    target = bench.target(clone.volume_id)
    await bench.stage(clone.volume_id, mount(fs_type))
    answer = await bench.publish(clone.volume_id, target, mount(fs_type), deferred=True)
    by_xfs = fs_type == "xfs"
    assert ("nouuid" in answer.deferred_mount.mount_options) == by_xfs
    assert shares(bench, "clone") == by_xfs
    inside = str(bench.root / "beside")
    os.mkdir(inside)
    options = tuple(answer.deferred_mount.mount_options)
    mount_api.mount_device(scene.device(clone.volume_id), inside, fs_type, options)
    assert Path(inside, "file").read_bytes() == b"kept"
    mount_api.unmount(inside)
    await scene.down(clone.volume_id)

    await bench.stage(clone.volume_id, mount(fs_type))
    answer = await bench.publish(clone.volume_id, target, mount(fs_type), deferred=True)
    assert "nouuid" not in answer.deferred_mount.mount_options
    assert not shares(bench, "clone")
    for volume in (clone, source):
        await scene.down(volume.volume_id)
    same = uuid_of(bench, clone.volume_id) == uuid_of(bench, source.volume_id)
    assert same == (fs_type == "ext4")


async def test_a_btrfs_with_a_log_keeps_its_uuid_and_its_data(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """btrfstune changes it all the same, and nothing mounts the result."""
    bench = scene.bench
    source = await bench.create("source", mount("btrfs"), size=256 * MIB)
    inside = await scene.up(source.volume_id, "btrfs")
    image = bench.root / "state" / "images" / f"{source.volume_id}.img"
    write(inside, "early", b"early")
    scene.guests.stop(bench.target(source.volume_id))
    scene.start(source.volume_id, "btrfs")
    with open(os.path.join(inside, "synced"), "wb") as file:
        file.write(b"synced")
        file.flush()
        os.fsync(file.fileno())  # which leaves it in the log tree
    taken = image.read_bytes()
    scene.guests.stop(bench.target(source.volume_id))
    await scene.down(source.volume_id)
    clone = await made_of(bench, "clone", volume_id=source.volume_id, fs_type="btrfs")
    cut = bench.root / "state" / "images" / f"{clone.volume_id}.img"
    cut.write_bytes(taken)
    with monkeypatch.context() as older:  # a kernel that would show the source in its place
        older.setattr(uuids, "_TEMPORARY_FSIDS", "/sys/no/such/feature")
        with pytest.raises(uuids.DuplicateFilesystemUuid):
            await bench.stage(clone.volume_id, mount("btrfs"))
    target = await up(bench, clone.volume_id, "btrfs")
    assert Path(target, "synced").read_bytes() == b"synced"
    assert uuid_of(bench, clone.volume_id) == uuid_of(bench, source.volume_id)
    await scene.down(clone.volume_id)
    await up(bench, clone.volume_id, "btrfs")
    assert Path(target, "synced").read_bytes() == b"synced"
    await scene.down(clone.volume_id)
    assert uuid_of(bench, clone.volume_id) != uuid_of(bench, source.volume_id)


@pytest.mark.parametrize(("fs_type", "size"), RENEWED)
async def test_a_stage_that_is_cut_short_after_the_change_changes_it_again(
    scene: Scene, fs_type: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = scene.bench
    source = await bench.create("source", mount(fs_type), size=size)
    target = await up(bench, source.volume_id, fs_type)
    write(target, "file", b"kept")
    clone = await made_of(bench, "clone", volume_id=source.volume_id, fs_type=fs_type)

    class Killed(BaseException):
        """The end of a process."""

    save = bench.driver.state.volume_records.save

    def die_when_it_is_done(record: Record) -> Record:
        if not record.renews_uuid:
            raise Killed
        return save(record)

    with monkeypatch.context() as patched:
        patched.setattr(bench.driver.state.volume_records, "save", die_when_it_is_done)
        with pytest.raises(Killed):
            await bench.stage(clone.volume_id, mount(fs_type))
    first = uuid_of(bench, clone.volume_id)
    bench.restart()
    assert shares(bench, "clone")
    assert bench.driver.state.volume_records.load(volume_records.volume_id_of("clone")).renews_uuid
    beside = await up(bench, clone.volume_id, fs_type)
    assert Path(beside, "file").read_bytes() == b"kept"
    for volume in (clone, source):
        await scene.down(volume.volume_id)
    assert len({first, *(uuid_of(bench, each.volume_id) for each in (clone, source))}) == 3


def cut_short(image: Path, limit_bytes: int) -> bytes:
    """Have xfs_db die at its first write behind `limit_bytes`; answers what it would say if it were run again."""
    tool = ["xfs_db", "-x", "-c", "uuid generate"]
    dying = f'ulimit -f {limit_bytes // 1024}; exec "$@"'
    subprocess.run(["bash", "-c", dying, "bash", *tool, str(image)], check=False)
    aside = image.with_suffix(".again")
    subprocess.run(["cp", "--reflink=always", str(image), str(aside)], check=True)
    again = subprocess.run([*tool, str(aside)], check=True, capture_output=True)
    aside.unlink()
    return again.stdout + again.stderr


def mark(image: Path) -> None:
    """What btrfstune has written when it dies in the middle."""
    with image.open("r+b") as file:
        for place in btrfs_uuid._PLACES[:2]:
            file.seek(place)
            block = bytearray(file.read(4096))
            (flags,) = struct.unpack_from("<Q", block, 0x38)
            struct.pack_into("<Q", block, 0x38, flags | 1 << 36)
            block[:4] = btrfs_uuid._sum(block)
            file.seek(place)
            file.write(block)


def refused(image: Path) -> bytes:
    again = subprocess.run(["btrfstune", "-fm", str(image)], check=False, capture_output=True)
    return again.stderr


async def used_source(scene: Scene, fs_type: str, size: int) -> str:
    """A volume whose log has gone some way."""
    source = await scene.bench.create("source", mount(fs_type), size=size)
    target = await up(scene.bench, source.volume_id, fs_type)
    write(target, "file", b"kept")
    for number in range(500):
        write(target, f"more-{number}", b"x" * 5000)
    await scene.down(source.volume_id)
    return source.volume_id


async def begun_clone(scene: Scene, source: str, fs_type: str) -> Path:
    """The image of a clone whose change of UUID is on record and not done."""
    clone = await made_of(scene.bench, "clone", volume_id=source, fs_type=fs_type)
    known = scene.bench.driver.state.volume_records
    known.save(known.load(volume_records.volume_id_of("clone")).but(renews_uuid=True))
    return scene.bench.root / "state" / "images" / f"{clone.volume_id}.img"


async def restored_of(scene: Scene, snapshot_id: str) -> csi_pb2.Volume:
    return await made_of(scene.bench, "restored", snapshot_id=snapshot_id, fs_type="xfs")


async def check_mended(scene: Scene, source: str, fs_type: str) -> None:
    """The clone mounts as another than its source, with the files."""
    bench, clone = scene.bench, volume_records.volume_id_of("clone")
    beside = await up(bench, clone, fs_type)
    assert Path(beside, "file").read_bytes() == b"kept"
    assert "nouuid" not in options_at(beside)
    assert not bench.driver.state.volume_records.load(clone).renews_uuid
    await scene.down(clone)
    assert uuid_of(bench, clone) != uuid_of(bench, source)
    await bench.delete(clone)


async def test_an_xfs_whose_log_was_being_cleared_when_the_power_failed_is_mended(
    scene: Scene,
) -> None:
    """Nothing mounts it; xfs_db refuses it, or makes of it what nothing mounts either."""
    size = 320 * MIB
    source = await used_source(scene, "xfs", size)
    said = []
    for part in (0.2, 0.52, 0.6, 0.7):
        image = await begun_clone(scene, source, "xfs")
        said.append(cut_short(image, int(size * part)))
        torn = volume_records.volume_id_of("clone")
        copy = await made_of(scene.bench, "copy", volume_id=torn, fs_type="xfs")
        taken = await snapshot(scene.bench, torn)
        await check_mended(scene, source, "xfs")
        for volume_id in (copy.volume_id, (await restored_of(scene, taken.snapshot_id)).volume_id):
            assert Path(await up(scene.bench, volume_id, "xfs"), "file").read_bytes() == b"kept"
            await scene.down(volume_id)
            await scene.bench.delete(volume_id)
        await drop(scene.bench, taken.snapshot_id)
    assert any(b"totally zeroed log" in each for each in said)
    assert any(b"cannot find log head" in each for each in said)


async def test_a_btrfs_that_was_being_changed_when_the_power_failed_is_mended(
    scene: Scene,
) -> None:
    """Its mark keeps btrfstune and mount(2) away."""
    source = await used_source(scene, "btrfs", 256 * MIB)
    image = await begun_clone(scene, source, "btrfs")
    mark(image)
    assert b"in progress" in refused(image)
    await check_mended(scene, source, "btrfs")


@pytest.mark.parametrize(("fs_type", "size"), RENEWED)
async def test_a_tool_that_outlives_the_driver_keeps_the_next_from_the_device(
    scene: Scene, fs_type: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """xfs_db and btrfstune open a device as anybody may; mounted meanwhile it would be torn."""
    bench = scene.bench
    source = await used_source(scene, fs_type, size)
    clone = await made_of(bench, "clone", volume_id=source, fs_type=fs_type)
    tools: list[subprocess.Popen[bytes]] = []

    class Killed(BaseException):
        """The end of the driver, and not of what it began."""

    async def begin(argv: Sequence[str], **how: Any) -> commands.Completed:
        tools.append(lasting(how["inherits"]))
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(commands, "run", begin)
        with pytest.raises(Killed):
            await bench.stage(clone.volume_id, mount(fs_type))
    bench.restart()
    with pytest.raises(devices.DeviceInUse):
        await bench.stage(clone.volume_id, mount(fs_type))
    [tool] = tools
    tool.communicate()
    await check_mended(scene, source, fs_type)


def lasting(inherits: Sequence[int]) -> subprocess.Popen[bytes]:
    """A program that runs until its input ends."""
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=tuple(inherits))
