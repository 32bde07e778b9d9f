"""One damaged file, or a content record that is lost, harms what it belongs to; nothing is formatted again."""

import asyncio
import errno
import os
import re
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from crust.blockdriver.engines import pool_access
from crust.blockdriver.engines.pool_access import Access
from crust.blockdriver.engines.protocol import ImageMissing, SnapshotMissing
from crust.blockdriver.records import models
from crust.blockdriver.records.health import Kind
from crust.core import errors, volumes
from crust.host.block import loop
from crust.host.filesystems import mkfs
from crust.host.mounts import mount_api
from crust.host.process import syscalls
from tests.integration.host.conftest import partition_table
from tests.support.co import encoded
from tests.support.drivers.block_driver import MIB, Bench, block, mount
from tests.support.raised import raised
from tests.support.records import copies, pool_layout
from tests.support.records.copies import made_of

pytestmark = pytest.mark.root

Damage = Callable[[Path, pytest.MonkeyPatch], AbstractContextManager[None]]


@contextmanager
def gone(path: Path, _: pytest.MonkeyPatch) -> Iterator[None]:
    aside = path.parent.parent / "aside"
    path.rename(aside)
    yield
    aside.rename(path)


@contextmanager
def a_directory(path: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    with gone(path, patch):
        path.mkdir()
        yield
        path.rmdir()


@contextmanager
def a_link(path: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    with gone(path, patch):
        path.symlink_to(path.parent.parent / "aside")
        yield
        path.unlink()


def holding(change: Callable[[bytes], bytes]) -> Damage:
    @contextmanager
    def damage(path: Path, _: pytest.MonkeyPatch) -> Iterator[None]:
        before = path.read_bytes()
        path.write_bytes(change(before))
        yield
        path.write_bytes(before)

    return damage


def answered_by(code: int) -> Damage:
    """Every look at the file fails, as on a damaged inode or a bad sector."""

    @contextmanager
    def damage(path: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
        with patch.context() as patched:
            for name in ("open", "stat", "lstat", "unlink"):
                patched.setattr(os, name, _failing(getattr(os, name), _own_name(path), code))
            yield

    return damage


def _own_name(path: Path) -> str:
    """The end of the path that no other file of the pool has; the driver reaches it below a descriptor."""
    is_record = path.name in ("volume.json", "content.json", "set.json")
    return f"{path.parent.name}/{path.name}" if is_record else path.name


def _failing(real: Callable[..., Any], name: str, code: int) -> Callable[..., Any]:
    def call(path: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(path, int) and os.fsdecode(path).endswith(name):
            raise OSError(code, os.strerror(code), path)
        return real(path, *args, **options)

    return call


DAMAGES: dict[str, Damage] = {
    "gone": gone,
    "a directory": a_directory,
    "a link": a_link,
    "empty": holding(lambda _: b""),
    "halved": holding(lambda data: data[: len(data.rstrip()) // 2]),
    "zeros": holding(lambda data: bytes(min(len(data), MIB))),
    "of a later schema": holding(
        lambda data: re.sub(rb'"schema":\d', b'"schema":9', data, count=1)
    ),
    "EUCLEAN": answered_by(errno.EUCLEAN),
    "EIO": answered_by(errno.EIO),
}


@dataclass(frozen=True, slots=True)
class Owned:
    """A volume that is published, its snapshot, and a group of it."""

    volume_id: str
    target: str
    snapshot_id: str
    group_id: str


async def owned(bench: Bench, name: str) -> Owned:
    volume_id = (await bench.create(name, size=16 * MIB)).volume_id
    taken = await bench.co.snapshot(volume_id, f"{name}-snapshot")
    members = await bench.co.group(volume_id, name=f"{name}-group")
    target = bench.target(name)
    await bench.up(volume_id, target)
    Path(target, "file").write_text("precious")
    return Owned(volume_id, target, taken.snapshot_id, members.group_snapshot_id)


def path_of(bench: Bench, file: str, of: Owned) -> Path:
    state, run = bench.root / "state", bench.root / "run" / syscalls.boot_id()
    return {
        "volume record": pool_layout.volume_record(state, of.volume_id),
        "content record": pool_layout.content_record(state, of.volume_id),
        "snapshot record": pool_layout.snapshot_set(state, of.snapshot_id),
        "group record": pool_layout.snapshot_set(state, of.group_id),
        "image": pool_layout.image(state, of.volume_id),
        "image of a snapshot": pool_layout.snapshot_image(state, of.snapshot_id),
        "node state": run / f"{of.volume_id}.json",
    }[file]


TOLD_BY_THE_VOLUME = ("volume record", "content record", "image")
TOLD_BY_THE_POOL = ("snapshot record", "group record")


async def check_others(bench: Bench, other: Owned) -> None:
    """Every call that looks at all volumes answers, and the other volume can do what it always can."""
    listed = await bench.co.volumes()
    assert not listed[other.volume_id].status.volume_condition.abnormal
    assert other.snapshot_id in await bench.co.snapshots()
    assert await bench.co.capacity() > 0
    await bench.driver.collect_garbage()
    await bench.driver.controller.modifier.finish_interrupted()
    assert (await bench.stats(other.volume_id, other.target)).usage
    again = bench.target("again")
    await bench.publish(other.volume_id, again)
    assert Path(again, "file").read_text() == "precious"
    await bench.unpublish(other.volume_id, again)
    new = (await bench.create("new", size=16 * MIB)).volume_id
    await bench.delete(new)


async def check_told(bench: Bench, file: str, damaged: Owned) -> None:
    rules = bench.driver.controller
    pool = rules.health_check.pool()
    assert all(finding.kind is Kind.DEGRADED for finding in pool), pool
    if file in TOLD_BY_THE_POOL:
        told = any(finding.reason.startswith("Snapshot") for finding in pool)
    else:
        entries, _ = rules.lister.health_page(0, "")
        findings = [entry.findings for entry in entries if entry.volume_id == damaged.volume_id]
        told = any(findings)
        if file == "volume record":
            assert f"the {16 * MIB} bytes of its size stay reserved" in findings[0][0].message
    assert told


@pytest.mark.parametrize(
    "file",
    [
        "volume record",
        "content record",
        "snapshot record",
        "group record",
        "image",
        "image of a snapshot",
        "node state",
    ],
)
async def test_damaged_file_affects_only_its_own_volume(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    damaged, other = await owned(bench, "damaged"), await owned(bench, "other")
    path = path_of(bench, file, damaged)
    for name, damage in DAMAGES.items():
        if file.startswith("image") and name == "of a later schema":
            continue
        with damage(path, monkeypatch):
            before = os.path.lexists(path)
            await asyncio.to_thread(bench.restart)
            await check_others(bench, other)
            assert os.path.lexists(path) == before, f"{name}: something else is there now"
            if file in TOLD_BY_THE_VOLUME or (file in TOLD_BY_THE_POOL and name != "gone"):
                await check_told(bench, file, damaged)
    await asyncio.to_thread(bench.restart)
    assert Path(damaged.target, "file").read_text() == "precious"
    for volume in (damaged, other):
        await bench.down(volume.volume_id, volume.target)
        await bench.delete(volume.volume_id)


def content_path(bench: Bench, volume_id: str) -> Path:
    return pool_layout.content_record(bench.root / "state", volume_id)


@pytest.mark.parametrize("used", [False, True], ids=["never used", "used"])
async def test_stage_without_a_content_record_is_refused(bench: Bench, *, used: bool) -> None:
    volume_id, target = (await bench.create()).volume_id, bench.target("pod")
    if used:
        await bench.up(volume_id, target)
        Path(target, "kept").write_text("data")
        await bench.down(volume_id, target)
    kept = content_path(bench, volume_id).read_bytes()
    content_path(bench, volume_id).unlink()
    before = bench.image(volume_id).read_bytes()
    bench.restart()
    for capability in (mount(), block()):
        with pytest.raises(models.RecordMissing):
            await bench.stage(volume_id, capability)
    for copy in (bench.co.snapshot(volume_id), made_of(bench, "clone", volume_id=volume_id)):
        with pytest.raises(models.RecordMissing):
            await copy
    assert bench.image(volume_id).read_bytes() == before
    [entry] = (await bench.co.volumes()).values()
    assert entry.status.volume_condition.abnormal
    assert volume_id in entry.status.volume_condition.message
    content_path(bench, volume_id).write_bytes(kept)
    content_path(bench, volume_id).chmod(0o600)
    await bench.up(volume_id, target)
    assert Path(target, "kept").exists() == used


async def test_delete_without_a_content_record_removes_the_volume(bench: Bench) -> None:
    volume_id = volumes.VolumeId((await bench.create()).volume_id)
    content_path(bench, volume_id).unlink()
    await bench.delete(volume_id)
    assert [*bench.root.glob("state/*/*.*")] == []
    assert (await bench.create()).volume_id == volume_id


@pytest.mark.parametrize("capability", [mount(), block()], ids=["mount", "block"])
async def test_stage_on_a_stale_content_record_clears_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capability: volumes.VolumeCapability
) -> None:
    """An interrupted mkfs is on record when it is read; by the time of the write somebody has finished it."""
    volume_id = volumes.VolumeId((await bench.create()).volume_id)
    records = bench.driver.stores.content_records
    begun = records.save(records.load(volume_id).replaced(state="formatting", fs_type="ext4"))
    bench.image(volume_id).write_bytes(b"somebody's data".ljust(64 << 20, b"\0"))
    real_attach = bench.driver.stores.access.attach

    def attach(attached: volumes.VolumeId, access: Access) -> Any:
        records.save(begun.replaced(state="formatted"))
        return real_attach(attached, access)

    monkeypatch.setattr(bench.driver.stores.access, "attach", attach)
    with pytest.raises(pool_access.RecordChanged):
        await bench.stage(volume_id, capability)
    assert bench.image(volume_id).read_bytes().startswith(b"somebody's data")
    assert records.load(volume_id).state == "formatted"


async def test_device_that_is_written_while_its_format_is_recorded_stays(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that opens it exclusively cannot; one that writes plainly is seen by a second look."""
    volume_id = volumes.VolumeId((await bench.create()).volume_id)
    records, exits = bench.driver.stores.content_records, list[int]()
    real_save = records.save

    def save(record: models.ContentRecord) -> models.ContentRecord:
        attached = bench.driver.stores.access.attached(volume_id)
        assert attached is not None
        device = attached.host_device.path
        exits.append(subprocess.run(["mkfs.ext4", "-q", device], check=False).returncode)
        Path(device).write_bytes(partition_table(sectors=1000))
        return real_save(record)

    with monkeypatch.context() as patched:
        patched.setattr(records, "save", save)
        with raised("DeviceNotBlank", match="partition table dos"):
            await bench.stage(volume_id)
    assert exits == [1]
    with raised("ContentInDoubt"):
        await bench.stage(volume_id)


@pytest.mark.parametrize(
    ("state", "refusal"), [("new", "ContentInDoubt"), ("formatting", "DeviceInUse")]
)
async def test_device_that_another_program_mounted_is_not_prepared(
    bench: Bench, state: models.ContentState, refusal: str
) -> None:
    """Its mount alone does not say that this driver has prepared it before."""
    volume_id, planned = volumes.VolumeId((await bench.create()).volume_id), str(uuid.uuid4())
    records, home = bench.driver.stores.content_records, bench.root / "home"
    if state == "formatting":
        records.save(
            records.load(volume_id).replaced(state=state, fs_type="ext4", planned_uuid=planned)
        )
    device = loop.attach(str(bench.image(volume_id)), once=True)
    mkfs_ext4 = ["mkfs.ext4", "-q", "-U", planned, device.path]
    await asyncio.to_thread(subprocess.run, mkfs_ext4, check=True)
    home.mkdir()
    mount_api.mount_device(device.path, str(home), "ext4")
    with raised(refusal):
        await bench.stage(volume_id)
    assert records.load(volume_id).state == state
    with raised("NotStaged"):
        await bench.publish(volume_id, bench.target("pod"))
    mount_api.unmount(str(home))
    if state == "formatting":
        await bench.stage(volume_id)
        assert records.load(volume_id).state == "formatted"
    else:
        loop.detach(device)


async def test_stage_is_not_finished_when_another_writer_came_during_mkfs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume_id = volumes.VolumeId((await bench.create()).volume_id)
    records = bench.driver.stores.content_records
    real_make = mkfs.make

    async def make(*args: Any, **kwargs: Any) -> None:
        await real_make(*args, **kwargs)
        records.save(records.load(volume_id).replaced(in_guest=True))

    with monkeypatch.context() as patched:
        patched.setattr(mkfs, "make", make)
        with pytest.raises(pool_access.RecordChanged) as refused:
            await bench.stage(volume_id)
    assert isinstance(refused.value, errors.OperationPending)
    assert (records.load(volume_id).state, records.load(volume_id).in_guest) == ("formatting", True)
    await bench.stage(volume_id)
    assert records.load(volume_id).state == "formatted"


async def test_volume_without_file_is_lost_to_calls_and_deletable(
    bench: Bench,
) -> None:
    volume_id = (await bench.create()).volume_id
    await bench.attach(volume_id)
    bench.image(volume_id).unlink()
    calls: list[Callable[[], Any]] = [
        bench.create,
        lambda: bench.co.confirms(volume_id, encoded(mount())),
        lambda: bench.attach(volume_id),
        lambda: bench.grow(volume_id, 128 * MIB),
        lambda: bench.modify(volume_id, readIOPS="100"),
        lambda: bench.co.snapshot(volume_id),
        lambda: bench.co.group(volume_id),
        lambda: copies.made_of(bench, "copy", volume_id=volume_id),
        lambda: bench.stage(volume_id),
    ]
    for call in calls:
        with pytest.raises(ImageMissing, match="delete the volume"):
            await call()
    assert pool_layout.images(bench.root / "state") == set()
    await bench.release(volume_id)
    for _ in range(2):
        await bench.delete(volume_id)
    assert bench.driver.stores.volume_records.find(bench.ids.volume_id("pvc-1")) is None
    assert (await bench.create()).volume_id == volume_id, "after its end it is new"


async def test_pod_of_a_volume_whose_file_was_removed_can_end(bench: Bench) -> None:
    volume_id, target = (await bench.create()).volume_id, bench.target("pod")
    await bench.up(volume_id, target)
    bench.image(volume_id).unlink()
    with pytest.raises(ImageMissing):
        await bench.create()
    await bench.down(volume_id, target)
    await bench.delete(volume_id)
    assert bench.driver.stores.volume_records.find(bench.ids.volume_id("pvc-1")) is None


async def test_snapshot_without_its_file_is_not_taken_again_by_retry(bench: Bench) -> None:
    volume_id = (await bench.create()).volume_id
    taken = await bench.co.snapshot(volume_id)
    group = await bench.co.group(volume_id)
    for image in pool_layout.snapshot_images(bench.root / "state"):
        pool_layout.snapshot_image(bench.root / "state", image).unlink()
    calls: list[Callable[[], Any]] = [
        lambda: bench.co.snapshot(volume_id),
        lambda: bench.co.group(volume_id),
        lambda: copies.made_of(bench, "copy", snapshot_id=taken.snapshot_id),
    ]
    for call in calls:
        with pytest.raises(SnapshotMissing, match="delete the snapshot") as caught:
            await call()
        assert isinstance(caught.value, errors.Corrupt)
    assert pool_layout.images(bench.root / "state") == {volume_id}
    assert pool_layout.snapshot_images(bench.root / "state") == set()
    await bench.co.delete_snapshot(taken.snapshot_id)
    await bench.co.delete_group(group)
    assert list((bench.root / "state" / "snapshots").iterdir()) == []
    assert (await bench.co.snapshot(volume_id)).snapshot_id == taken.snapshot_id
