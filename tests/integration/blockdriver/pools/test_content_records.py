"""A content record that is lost, or was written by somebody else meanwhile: nothing is formatted, nothing cleared."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crust.blockdriver.engines import pool_store
from crust.blockdriver.engines.node_access import Access
from crust.blockdriver.engines.protocol import ImageMissing, SnapshotMissing
from crust.blockdriver.records import models
from crust.core import errors, volumes
from crust.host.filesystems import mkfs
from tests.support import volume_capabilities
from tests.support.drivers.block_driver import MIB, Bench, block, mount
from tests.support.records import copies, pool_layout
from tests.support.records.copies import made_of

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]


def content_path(bench: Bench, volume_id: str) -> Path:
    return pool_layout.content_record(bench.root / "state", volume_id)


def image_path(bench: Bench, volume_id: str) -> Path:
    return pool_layout.image(bench.root / "state", volume_id)


@pytest.mark.parametrize("used", [False, True], ids=["never used", "used"])
async def test_stage_without_a_content_record_is_refused(bench: Bench, *, used: bool) -> None:
    volume_id, target = (await bench.create()).volume_id, bench.target("pod")
    if used:
        await bench.up(volume_id, target)
        Path(target, "kept").write_text("data")
        await bench.down(volume_id, target)
    kept = content_path(bench, volume_id).read_bytes()
    content_path(bench, volume_id).unlink()
    before = image_path(bench, volume_id).read_bytes()
    bench.restart()
    for capability in (mount(), block()):
        with pytest.raises(models.RecordMissing):
            await bench.stage(volume_id, capability)
    for copy in (bench.co.snapshot(volume_id), made_of(bench, "clone", volume_id=volume_id)):
        with pytest.raises(models.RecordMissing):
            await copy
    assert image_path(bench, volume_id).read_bytes() == before
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
    begun = records.save(records.load(volume_id).but(state="formatting", fs_type="ext4"))
    image_path(bench, volume_id).write_bytes(b"somebody's data".ljust(64 << 20, b"\0"))
    real_attach = bench.driver.stores.access.attach

    def attach(each: volumes.VolumeId, access: Access) -> Any:
        records.save(begun.but(state="formatted"))
        return real_attach(each, access)

    monkeypatch.setattr(bench.driver.stores.access, "attach", attach)
    with pytest.raises(pool_store.RecordChanged):
        await bench.stage(volume_id, capability)
    assert image_path(bench, volume_id).read_bytes().startswith(b"somebody's data")
    assert records.load(volume_id).state == "formatted"


async def test_stage_is_not_finished_when_another_writer_came_during_mkfs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume_id = volumes.VolumeId((await bench.create()).volume_id)
    records = bench.driver.stores.content_records
    real_make = mkfs.make

    async def make(*args: Any, **kwargs: Any) -> None:
        await real_make(*args, **kwargs)
        records.save(records.load(volume_id).but(in_guest=True))

    with monkeypatch.context() as patched:
        patched.setattr(mkfs, "make", make)
        with pytest.raises(pool_store.RecordChanged) as refused:
            await bench.stage(volume_id)
    assert isinstance(refused.value, errors.OperationPending)
    assert (records.load(volume_id).state, records.load(volume_id).in_guest) == ("formatting", True)
    await bench.stage(volume_id)
    assert records.load(volume_id).state == "formatted"


async def test_volume_without_its_file_is_lost_to_every_call_and_can_be_deleted(
    bench: Bench,
) -> None:
    volume_id = (await bench.create()).volume_id
    await bench.attach(volume_id)
    pool_layout.image(bench.root / "state", volume_id).unlink()
    calls: list[Callable[[], Any]] = [
        bench.create,
        lambda: bench.co.confirms(volume_id, volume_capabilities.encoded(mount())),
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
    pool_layout.image(bench.root / "state", volume_id).unlink()
    with pytest.raises(ImageMissing):
        await bench.create()
    await bench.down(volume_id, target)
    await bench.delete(volume_id)
    assert bench.driver.stores.volume_records.find(bench.ids.volume_id("pvc-1")) is None


async def test_snapshot_without_its_file_is_not_taken_again_by_a_retry(bench: Bench) -> None:
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
