"""Orphans of crashes are collected after the grace period; what is in use stays."""

import asyncio
import os
from pathlib import Path

import pytest

from crust.blockdriver import driver
from crust.blockdriver.controller import orphans
from crust.blockdriver.engines.pool_store import RecordChanged
from crust.blockdriver.node import node_state
from crust.core import errors, volumes
from crust.host.block import loop, loop_devices, loopctl
from crust.host.process import boot
from tests.support.drivers.block_driver import MIB, Bench, block, mount
from tests.support.records import pool_layout

pytestmark = pytest.mark.root


def devices(bench: Bench) -> list[str]:
    return [
        each.path for each in loop_devices.list_all() if each.backing.startswith(f"{bench.root}/")
    ]


async def collect(bench: Bench, *, grace_s: float = 0.0) -> tuple[volumes.VolumeId, ...]:
    return await bench.driver.collect_garbage(grace_s=grace_s)


async def test_gc_removes_an_interrupted_create_after_the_grace_period(
    bench: Bench,
) -> None:
    volume_id = volumes.VolumeId((await bench.create()).volume_id)
    kept = volumes.VolumeId((await bench.create("pvc-2")).volume_id)
    known = bench.driver.stores.volume_records
    known.save(known.load(volume_id).but(phase="creating"))
    bench.restart()
    assert await collect(bench, grace_s=orphans.GRACE_S) == ()
    assert await collect(bench) == (volume_id,)
    assert bench.driver.stores.volume_records.ids() == (kept,)
    assert pool_layout.images(bench.root / "state") == {kept}
    assert (await bench.create()).volume_id == volume_id


async def test_gc_keeps_a_volume_that_was_used_although_its_record_is_of_its_creation(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """A record of a backup: tar keeps the time of the file, so it is old at once."""
    volume_id = volumes.VolumeId((await bench.create()).volume_id)
    known = bench.driver.stores.volume_records
    created = known.load(volume_id)
    await bench.stage(volume_id)
    await bench.publish(volume_id, bench.target("a"))
    await bench.unpublish(volume_id, bench.target("a"))
    await bench.unstage(volume_id)
    known.save(known.load(volume_id).but(phase="creating"))
    bench.restart()
    assert await collect(bench) == ()
    assert "an unfinished volume stays" in caplog.text
    assert (pool_layout.image(bench.root / "state", volume_id)).exists()
    left = bench.driver.stores.volume_records.find(volume_id)
    assert left is not None
    bench.driver.stores.volume_records.save(left.but(phase=created.phase))
    bench.restart()
    await bench.stage(volume_id)


async def test_gc_does_not_delete_what_was_made_again_since_it_looked(bench: Bench) -> None:
    """By another controller of a shared pool: this process's locks are not its."""
    volume_id = volumes.VolumeId((await bench.create()).volume_id)
    known = bench.driver.stores.volume_records
    known.save(known.load(volume_id).but(phase="deleting"))
    bench.restart()
    collector = bench.driver.volume_orphans
    judged = collector._orphan(volume_id, orphans.GRACE_S)
    assert judged is not None
    assert (await bench.create()).volume_id == volume_id
    with pytest.raises(RecordChanged):
        collector._provisioner.remove(judged)
    assert bench.driver.stores.volume_records.load(volume_id).phase == "ready"
    assert (pool_layout.image(bench.root / "state", volume_id)).exists()


async def test_gc_finishes_an_interrupted_delete_at_once(bench: Bench) -> None:
    volume_id = volumes.VolumeId((await bench.create()).volume_id)
    known = bench.driver.stores.volume_records
    known.save(known.load(volume_id).but(phase="deleting"))
    bench.restart()
    assert await collect(bench, grace_s=orphans.GRACE_S) == (volume_id,)
    assert bench.driver.stores.volume_records.ids() == ()


async def test_gc_detaches_a_device_that_was_never_staged(bench: Bench) -> None:
    volume_id = volumes.VolumeId((await bench.create()).volume_id)
    bench.driver.stores.access.attach(volume_id)
    bench.restart()
    assert len(devices(bench)) == 1
    await collect(bench)
    assert devices(bench) == []


async def test_gc_keeps_devices_that_are_staged_or_in_use(bench: Bench) -> None:
    await bench.staged("a")
    used, target = (await bench.create("b", block())).volume_id, bench.target("b")
    await bench.stage(used, block())
    await bench.publish(used, target, block())
    mounted, other = (await bench.create("c")).volume_id, bench.target("c")
    await bench.stage(mounted)
    await bench.publish(mounted, other)
    node_state = bench.driver.stores.node_state
    for each in (used, mounted):
        node_state.forget_staged(volumes.VolumeId(each))
    bench.restart()
    await collect(bench)
    assert len(devices(bench)) == 3
    assert Path(target).is_block_device()
    for volume_id, path in ((used, target), (mounted, other)):
        await bench.unpublish(volume_id, path)
    await collect(bench)
    assert len(devices(bench)) == 1


async def test_gc_keeps_images_without_record_and_records_without_image(
    bench: Bench,
) -> None:
    lost = (await bench.create("lost", mount())).volume_id
    pool = bench.root / "state"
    pool_layout.image(pool, lost).unlink()
    orphan = pool_layout.image(pool, bench.ids.volume_id("orphan"))
    orphan.write_bytes(b"unknown")
    bench.restart()
    assert await collect(bench) == ()
    assert orphan.read_bytes() == b"unknown"
    assert bench.driver.stores.volume_records.ids() == (lost,)


async def test_gc_detaches_a_device_of_a_removed_image_by_its_tag_when_unused(
    bench: Bench,
) -> None:
    volume_id = await bench.staged()
    image = pool_layout.image(bench.root / "state", volume_id)
    [device] = devices(bench)
    image.unlink()
    image.write_bytes(bytes(64 * MIB))  # another file of that name is another image
    bench.restart()
    with open(device, "rb"):
        await collect(bench)
        assert devices(bench) == [device]
    await collect(bench)
    assert devices(bench) == []


async def test_gc_keeps_an_orphan_device_whose_node_is_bound(bench: Bench) -> None:
    volume_id, target = (await bench.create("a", block())).volume_id, bench.target("a")
    await bench.stage(volume_id, block())
    await bench.publish(volume_id, target, block())
    (pool_layout.image(bench.root / "state", volume_id)).unlink()
    bench.restart()
    await collect(bench)
    assert len(devices(bench)) == 1
    await bench.unpublish(volume_id, target)
    await collect(bench)
    assert devices(bench) == []


async def test_gc_never_touches_a_device_attached_by_others(bench: Bench, tmp_path: Path) -> None:
    volume_id = (await bench.create()).volume_id
    image = pool_layout.image(bench.root / "state", volume_id)
    stranger = tmp_path / "stranger"
    stranger.write_bytes(bytes(MIB))
    other_pool = f"crust:{'0' * 12}:{volume_id}"
    ours = loop.attach(str(image))
    theirs = loop.attach_once(str(stranger), tag=other_pool)
    stranger.unlink()
    bench.restart()
    await collect(bench)
    assert sorted(devices(bench)) == sorted([ours.path, theirs.path])
    for each in (ours, theirs):
        loop.detach(each)


async def test_start_and_gc_open_no_device_of_another_program(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel asks the filesystem of the backing file about each open one: a dead file server would hang both."""
    volume_id = volumes.VolumeId((await bench.create()).volume_id)
    await bench.stage(volume_id)
    other = tmp_path / "disk.img"
    other.write_bytes(bytes(MIB))
    stranger = loop.attach(str(other))
    opened: set[int] = set()
    status = loopctl.status

    def seen(fd: int) -> loopctl.Status:
        opened.add(os.minor(os.fstat(fd).st_rdev))
        return status(fd)

    monkeypatch.setattr(loopctl, "status", seen)
    try:
        bench.restart()
        await collect(bench)
        ours = bench.driver.stores.access.attached(volume_id)
        assert ours is not None
        assert opened == {ours.host_device.identity.minor}
    finally:
        loop.detach(stranger)


async def test_gc_runs_again_after_a_failure(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    again, tries = asyncio.Event(), 0

    async def collecting(_: object) -> tuple[volumes.VolumeId, ...]:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise errors.RuntimeFailed("the disk does not answer")
        again.set()
        await asyncio.get_running_loop().create_future()
        return ()

    monkeypatch.setattr(driver, "COLLECT_PERIOD_S", 0)
    monkeypatch.setattr(driver.Driver, "collect_garbage", collecting)
    forever = asyncio.create_task(bench.driver.keep_collecting_garbage())
    await again.wait()
    forever.cancel()


async def test_unreadable_node_state_of_a_volume_is_removed_by_unpublish_and_unstage(
    bench: Bench,
) -> None:
    damaged, other = await bench.create("damaged"), await bench.create("other")
    for volume in (damaged, other):
        await bench.stage(volume.volume_id)
        await bench.publish(volume.volume_id, bench.target(volume.volume_id))
    state = bench.root / "run" / boot.boot_id()
    for path in state.glob("*/*.json"):
        if damaged.volume_id in path.read_text():
            path.write_text(path.read_text()[:-20])
    await asyncio.to_thread(bench.restart)
    await bench.driver.collect_garbage()
    with pytest.raises(node_state.UnreadableEntry):
        await bench.publish(damaged.volume_id, bench.target("again"))
    for volume in (other, damaged):
        await bench.unpublish(volume.volume_id, bench.target(volume.volume_id))
        await bench.unstage(volume.volume_id)
        await bench.delete(volume.volume_id)
    assert [*state.glob("*/*.json")] == []
