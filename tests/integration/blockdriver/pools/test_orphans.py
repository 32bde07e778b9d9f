"""What crashes leave is removed; what is in use, and what nobody knows the owner of, stays."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from crust.blockdriver import driver
from crust.core import errors, volumes
from crust.host.block import loop, loopctl
from crust.host.files import sparse
from crust.host.files.durable import AnyPath
from crust.host.process import syscalls
from tests.support.drivers import remnants
from tests.support.drivers.block_driver import MIB, Bench, block
from tests.support.records import pool_layout

pytestmark = pytest.mark.root


def devices(bench: Bench) -> list[str]:
    return [device.path for device in remnants.devices(bench.root)]


async def collect(bench: Bench) -> None:
    await bench.driver.collect_garbage()


async def leave_half_made(bench: Bench, name: str) -> volumes.VolumeId:
    """What a create that was killed before its end leaves."""
    volume_id = volumes.VolumeId(bench.ids.volume_id(name))
    half = pool_layout.directory(bench.root / "state", f".new-{volume_id}")
    half.mkdir()
    (half / f"{volume_id}.img").write_bytes(b"half")
    return volume_id


@pytest.mark.parametrize("is_start", [False, True], ids=["gc", "start"])
async def test_what_is_half_made_or_half_removed_is_removed(
    bench: Bench, *, is_start: bool
) -> None:
    kept, gone = (await bench.create("a")).volume_id, (await bench.create("b")).volume_id
    await leave_half_made(bench, "c")
    pool = bench.root / "state"
    pool_layout.directory(pool, gone).rename(pool_layout.directory(pool, f".gone-{gone}.0123abcd"))
    if is_start:
        await asyncio.to_thread(bench.restart)
    else:
        await collect(bench)
    assert pool_layout.files(pool) == pool_layout.files_of(pool, [kept])
    assert (await bench.create("c", size=96 * MIB)).capacity_bytes == 96 * MIB


async def test_gc_passes_over_a_volume_that_a_call_works_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, copying, go_on = sparse.create, threading.Event(), threading.Event()

    def slowly(path: AnyPath, size_bytes: int, *, in_place: bool) -> None:
        create(path, size_bytes, in_place=in_place)
        copying.set()
        assert go_on.wait(60)

    monkeypatch.setattr(sparse, "create", slowly)
    making = asyncio.create_task(bench.create())
    await asyncio.to_thread(copying.wait)
    assert len(bench.driver.stores.provisioning.unsettled()) == 1
    await collect(bench)
    go_on.set()
    volume_id = (await making).volume_id
    pool = bench.root / "state"
    assert pool_layout.files(pool) == pool_layout.files_of(pool, [volume_id])


async def test_create_after_killed_create_may_have_other_arguments(
    bench: Bench,
) -> None:
    """Nobody was answered."""
    volume_id = await leave_half_made(bench, "pvc-1")
    made = await bench.create(capability=block(), size=96 * MIB)
    assert (made.volume_id, made.capacity_bytes) == (volume_id, 96 * MIB)
    pool = bench.root / "state"
    assert pool_layout.files(pool) == pool_layout.files_of(pool, [volume_id])


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
    await bench.up(used, target, block())
    mounted, other = (await bench.create("c")).volume_id, bench.target("c")
    await bench.up(mounted, other)
    node_state = bench.driver.stores.node_state
    for volume_id in (used, mounted):
        node_state.forget_staged(volumes.VolumeId(volume_id))
    bench.restart()
    await collect(bench)
    assert len(devices(bench)) == 3
    assert Path(target).is_block_device()
    for volume_id, path in ((used, target), (mounted, other)):
        await bench.unpublish(volume_id, path)
    await collect(bench)
    assert len(devices(bench)) == 1


async def test_gc_detaches_unused_device_of_removed_image_by_its_tag(bench: Bench) -> None:
    volume_id = await bench.staged()
    image = bench.image(volume_id)
    [device] = devices(bench)
    image.unlink()
    bench.restart()
    with open(device, "rb"):
        await collect(bench)
        assert devices(bench) == [device]
    await collect(bench)
    assert devices(bench) == []


async def test_gc_keeps_an_orphan_device_whose_node_is_bound(bench: Bench) -> None:
    volume_id, target = (await bench.create("a", block())).volume_id, bench.target("a")
    await bench.up(volume_id, target, block())
    (bench.image(volume_id)).unlink()
    bench.restart()
    await collect(bench)
    assert len(devices(bench)) == 1
    await bench.unpublish(volume_id, target)
    await collect(bench)
    assert devices(bench) == []


async def test_gc_never_touches_a_device_attached_by_others(bench: Bench, tmp_path: Path) -> None:
    volume_id = (await bench.create()).volume_id
    image = bench.image(volume_id)
    stranger = tmp_path / "stranger"
    stranger.write_bytes(bytes(MIB))
    other_pool = f"crust:{'0' * 12}:{volume_id}"
    ours = loop.attach(str(image))
    theirs = loop.attach(str(stranger), tag=other_pool, once=True)
    stranger.unlink()
    bench.restart()
    await collect(bench)
    assert sorted(devices(bench)) == sorted([ours.path, theirs.path])
    for device in (ours, theirs):
        loop.detach(device)


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
        assert opened == {bench.host_device(volume_id).identity.minor}
    finally:
        loop.detach(stranger)


async def test_gc_runs_again_after_a_failure(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    again, tries = asyncio.Event(), 0

    async def collecting(_: object) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise errors.RuntimeFailed("the disk does not answer")
        again.set()
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(driver, "COLLECT_PERIOD_S", 0)
    monkeypatch.setattr(driver.Driver, "collect_garbage", collecting)
    forever = asyncio.create_task(bench.driver.keep_collecting_garbage())
    await again.wait()
    forever.cancel()


async def test_unreadable_node_state_is_removed_by_unpublish_and_unstage(
    bench: Bench,
) -> None:
    damaged, other = await bench.create("damaged"), await bench.create("other")
    for volume in (damaged, other):
        await bench.up(volume.volume_id, bench.target(volume.volume_id))
    state = bench.root / "run" / syscalls.boot_id()
    for path in state.glob("*.json"):
        if damaged.volume_id == path.stem:
            path.write_text(path.read_text()[:-20])
    await asyncio.to_thread(bench.restart)
    await bench.driver.collect_garbage()
    with pytest.raises(errors.Corrupt, match="node state entry"):
        await bench.publish(damaged.volume_id, bench.target("again"))
    for volume in (other, damaged):
        await bench.down(volume.volume_id, bench.target(volume.volume_id))
        await bench.delete(volume.volume_id)
    assert [*state.glob("*.json")] == []
