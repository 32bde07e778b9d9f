"""A controller that is paused between check and change, while another one goes on and makes the name again."""

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from crust import errors, volumes
from crust.blockdriver.controller.modify_volume import Change, Expansion
from crust.blockdriver.driver import Driver
from crust.blockdriver.engines.pool_store import RecordChanged
from crust.blockdriver.engines.protocol import ChangedElsewhere
from crust.blockdriver.engines.rbd import volume_lock
from crust.blockdriver.engines.rbd.place import Place
from crust.blockdriver.engines.rbd.volume_lock import VolumeLocks
from crust.ceph import binding
from crust.ceph.failures import CephClientBlocklisted
from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.support.ceph.rbd_controllers import Controllers, created

MIB = 1024**2
DATA = b"of the second volume"


def _locks(driver: Driver) -> VolumeLocks:
    found = driver.stores.provisioning.locks  # type: ignore[attr-defined]
    assert isinstance(found, VolumeLocks)
    return found


class Pause:
    """The first of its calls waits until it is told to go on."""

    def __init__(self) -> None:
        self._is_first = True
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if self._is_first:
            self._is_first = False
            self.reached.set()
            assert self.go_on.wait(60)
        return real(*arguments, **named)


class Paused:
    """An object of the binding with one method that waits."""

    def __init__(self, real: Any, name: str, pause: Pause) -> None:
        self._binding, self._name, self._pause = real, name, pause

    def __getattr__(self, asked: str) -> Any:
        found = getattr(self._binding, asked)
        return functools.partial(self._pause, found) if asked == self._name else found


@contextlib.contextmanager
def paused(patch: pytest.MonkeyPatch, name: str) -> Iterator[Pause]:
    """The first caller of a method of rbd.RBD or rbd.Image sleeps before it."""
    pause = Pause()
    images, opened = vars(binding.Binding)["images"].fget, Place.image

    @contextlib.contextmanager
    def image(*arguments: Any, **named: Any) -> Iterator[Any]:
        with opened(*arguments, **named) as found:
            yield Paused(found, name, pause)

    with patch.context() as patching:
        patching.setattr(
            binding.Binding, "images", property(lambda self: Paused(images(self), name, pause))
        )
        patching.setattr(Place, "image", image)
        yield pause


def _call(self: object, pause: Pause, real: Callable[..., Any], *arguments: Any) -> Any:
    return pause(real, self, *arguments)


def _write(ceph: CephCluster, namespace: str, image: str, data: bytes) -> None:
    import rbd

    with ceph.ioctx(POOL, namespace) as ioctx, rbd.Image(ioctx, image) as opened:
        opened.write(data, 0)


def _read(ceph: CephCluster, namespace: str, image: str, length: int) -> bytes:
    import rbd

    with ceph.ioctx(POOL, namespace) as ioctx, rbd.Image(ioctx, image, read_only=True) as opened:
        found: bytes = opened.read(0, length)
        return found


async def _patient(driver: Driver, work: Any) -> Any:
    """Work of a controller that finds the lock of one that does not end."""
    with pytest.raises(ChangedElsewhere):
        await work()
    _locks(driver).patience_s = 0
    return await work()


@pytest.mark.parametrize("has_snapshot", [False, True], ids=["trash_move", "rename"])
async def test_delete_paused_before_its_removal_keeps_the_volume_that_replaced_it(
    controllers: Controllers,
    ceph: CephCluster,
    monkeypatch: pytest.MonkeyPatch,
    has_snapshot: bool,  # noqa: FBT001
) -> None:
    first, second = controllers.start(), controllers.start()
    volume_id = await created(first, "a")
    if has_snapshot:
        await first.snapshots.volume_snapshots.create("s", volume_id)
    removal = "rename" if has_snapshot else "trash_move"
    with paused(monkeypatch, removal) as pause:
        late = asyncio.create_task(first.controller_rules.provisioner.delete(volume_id))
        assert await asyncio.to_thread(pause.reached.wait, 60)
        await _patient(second, lambda: second.controller_rules.provisioner.delete(volume_id))
        assert await created(second, "a") == volume_id
        _write(ceph, controllers.namespace, volume_id, DATA)
        pause.go_on.set()
        with pytest.raises(CephClientBlocklisted):
            await late
    assert _read(ceph, controllers.namespace, volume_id, len(DATA)) == DATA
    assert second.stores.volume_records.load(volume_id).phase == "ready"
    # it serves again, by a new connection, and knows what stands
    assert await created(first, "a") == volume_id
    await first.controller_rules.provisioner.delete(volume_id)


async def test_no_call_of_a_change_is_made_by_the_connection_that_replaces_a_cut_off_one(
    controllers: Controllers, ceph: CephCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the calls of one change another thread may have found out, and connected again."""
    from crust.blockdriver.engines.rbd.provisioning.images import VolumeImages

    first, second = controllers.start(), controllers.start()
    volume_id = await created(first, "a")
    pause, delete = Pause(), VolumeImages.delete
    with monkeypatch.context() as patch:
        patch.setattr(VolumeImages, "delete", functools.partialmethod(_call, pause, delete))
        late = asyncio.create_task(first.controller_rules.provisioner.delete(volume_id))
        assert await asyncio.to_thread(pause.reached.wait, 60)
        await _patient(second, lambda: second.controller_rules.provisioner.delete(volume_id))
        await created(second, "a")
        with pytest.raises(CephClientBlocklisted):
            first.stores.provisioning.image_ids()
        assert first.stores.provisioning.image_ids() == {volume_id}, "it is connected again"
        pause.go_on.set()
        with pytest.raises(CephClientBlocklisted):
            await late
    assert second.stores.provisioning.image_ids() == {volume_id}


async def test_paused_removal_of_a_snapshot_keeps_the_snapshot_that_replaced_it(
    controllers: Controllers, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = controllers.start(), controllers.start()
    volume_id = await created(first, "a")
    snapshots = [each.snapshots.volume_snapshots for each in (first, second)]
    taken = await snapshots[0].create("s", volume_id)
    with paused(monkeypatch, "remove_snap") as pause:
        late = asyncio.create_task(asyncio.to_thread(snapshots[0].delete, taken.snapshot_id))
        assert await asyncio.to_thread(pause.reached.wait, 60)

        async def delete() -> None:
            second.refresh()
            await asyncio.to_thread(snapshots[1].delete, taken.snapshot_id)

        await _patient(second, delete)
        again = await snapshots[1].create("s", volume_id)
        pause.go_on.set()
        with pytest.raises(CephClientBlocklisted):
            await late
    assert second.stores.provisioning.snapshot_ids() == {again.snapshot_id}
    assert snapshots[1].find(again.snapshot_id) == again


async def test_paused_removal_of_a_group_keeps_the_group_that_replaced_it(
    controllers: Controllers, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = controllers.start(), controllers.start()
    ids = [await created(first, name) for name in ("a", "b")]
    groups = [each.snapshots.group_snapshots for each in (first, second)]
    group, members = await groups[0].create("g", ids)
    member_ids = [each.id for each in members]
    with paused(monkeypatch, "remove_snap") as pause:
        late = asyncio.create_task(asyncio.to_thread(groups[0].delete, group.id, member_ids))
        assert await asyncio.to_thread(pause.reached.wait, 60)

        async def delete() -> None:
            second.refresh()
            await asyncio.to_thread(groups[1].delete, group.id, member_ids)

        await _patient(second, delete)
        await groups[1].create("g", ids)
        pause.go_on.set()
        with pytest.raises(CephClientBlocklisted):
            await late
    assert second.stores.provisioning.snapshot_ids() == set(member_ids)


async def test_create_paused_before_its_image_leaves_none_without_a_record(
    controllers: Controllers, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = controllers.start(), controllers.start()
    with paused(monkeypatch, "create") as pause:
        late = asyncio.create_task(created(first, "a"))
        assert await asyncio.to_thread(pause.reached.wait, 60)
        volume_id = second.stores.pool.ids.volume_id("a")
        await _patient(second, lambda: second.controller_rules.provisioner.delete(volume_id))
        pause.go_on.set()
        with pytest.raises(CephClientBlocklisted):
            await late
    assert second.stores.provisioning.image_ids() == frozenset()
    assert await created(second, "a") == volume_id


async def test_paused_create_keeps_the_content_record_of_the_volume_that_replaced_it(
    controllers: Controllers, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = controllers.start(), controllers.start()
    provisioner = type(first.controller_rules.provisioner)
    pause, begin = Pause(), provisioner._begin
    with monkeypatch.context() as patch:
        patch.setattr(provisioner, "_begin", functools.partialmethod(_call, pause, begin))
        late = asyncio.create_task(created(first, "a"))
        assert await asyncio.to_thread(pause.reached.wait, 60)
        volume_id = await created(second, "a")
        pause.go_on.set()
        with pytest.raises(RecordChanged):
            await late
    assert second.stores.content_records.load(volume_id).volume_id == volume_id


async def test_snapshot_of_a_volume_that_a_node_was_given_meanwhile_is_not_answered(
    controllers: Controllers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would say that the volume was never written, and a volume made from it would be formatted."""
    driver = controllers.start()
    volume_id = await created(driver, "a")
    content, taking = driver.stores.content_records, driver.snapshots.volume_snapshots
    plan = taking.plan(volume_id, taking.pool.ids.snapshot_id("s"), "s")
    content.save(content.load(volume_id).but(in_guest=True))
    with pytest.raises(errors.OperationPending, match="given to a node"):
        await taking.take([plan])
    assert driver.stores.provisioning.snapshot_ids() == frozenset()
    assert (await taking.create("s", volume_id)).in_guest


async def test_lock_of_a_dead_controller_is_taken_over_after_the_patience_and_not_before(
    controllers: Controllers, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = controllers.start(), controllers.start()
    volume_id = await created(first, "a")
    locks, now_s = _locks(second), [0.0]
    locks.now_s = lambda: now_s[0]
    _locks(first)._take(volume_id, volume_lock._LocalLock(), _address(first))
    delete = second.controller_rules.provisioner.delete
    for now_s[0] in (0.0, 1.0, volume_lock.PATIENCE_S - 0.1):
        with pytest.raises(ChangedElsewhere, match=_address(first)):
            await delete(volume_id)
    now_s[0] = volume_lock.PATIENCE_S
    await delete(volume_id)
    named = [vars(each).get("client") for each in caplog.records if "is cut off" in each.message]
    assert named == [_address(first)]
    assert second.stores.volume_records.ids() == ()


async def test_lock_that_this_very_client_has_left_is_taken_again_at_once(
    controllers: Controllers, ceph: CephCluster
) -> None:
    driver = controllers.start()
    volume_id = await created(driver, "a")
    _locks(driver)._take(volume_id, volume_lock._LocalLock(), _address(driver))
    await driver.controller_rules.provisioner.delete(volume_id)
    assert _address(driver) not in ceph.command("osd blocklist ls").decode()


async def test_calls_of_one_controller_wait_for_each_other(controllers: Controllers) -> None:
    driver = controllers.start()
    volume_id = await created(driver, "a")
    taking = driver.snapshots.volume_snapshots
    taken = [await taking.create(f"s{each}", volume_id) for each in range(8)]
    with driver.workers.used():
        await asyncio.gather(*(asyncio.to_thread(taking.delete, each.id) for each in taken))
    assert driver.stores.provisioning.snapshot_ids() == frozenset()


def _address(driver: Driver) -> str:
    place = driver.stores.provisioning.place  # type: ignore[attr-defined]
    found: str = place.connection.address()
    return found


def _limited(iops: int) -> Change:
    return Change(limits=(("read_iops", iops),))


def _modify(driver: Driver, volume_id: volumes.VolumeId, change: Change) -> Any:
    async def work() -> Any:
        outcome = await driver.controller_rules.modifier.apply(volume_id, change)
        for each in (outcome.unmodified, outcome.expanded):
            if isinstance(each, errors.CrustError):
                raise each
        return outcome

    return work


def _limit(ceph: CephCluster, namespace: str, image: str) -> str:
    """The limit of reads that the image has; empty for none."""
    import rbd

    with ceph.ioctx(POOL, namespace) as ioctx, rbd.Image(ioctx, image, read_only=True) as opened:
        try:
            return str(opened.config_get("rbd_qos_read_iops_limit"))
        except KeyError:
            return ""


async def test_paused_change_of_limits_sets_none_on_the_volume_that_replaced_it(
    controllers: Controllers, ceph: CephCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = controllers.start(), controllers.start()
    volume_id = await created(first, "a")
    with paused(monkeypatch, "config_set") as pause:
        late = asyncio.create_task(_modify(first, volume_id, _limited(100))())
        assert await asyncio.to_thread(pause.reached.wait, 60)
        await _patient(second, lambda: second.controller_rules.provisioner.delete(volume_id))
        assert await created(second, "a") == volume_id
        pause.go_on.set()
        with pytest.raises(CephClientBlocklisted):
            await late
    assert _limit(ceph, controllers.namespace, volume_id) == ""
    assert second.stores.volume_records.load(volume_id).io_limits == volumes.IoLimits()
    await _modify(first, volume_id, _limited(200))()  # it serves again
    assert _limit(ceph, controllers.namespace, volume_id) == "200"


async def test_limits_of_a_paused_controller_do_not_replace_newer_ones(
    controllers: Controllers, ceph: CephCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = controllers.start(), controllers.start()
    volume_id = await created(first, "a")
    with paused(monkeypatch, "config_set") as pause:
        late = asyncio.create_task(_modify(first, volume_id, _limited(100))())
        assert await asyncio.to_thread(pause.reached.wait, 60)
        await _patient(second, _modify(second, volume_id, _limited(300)))
        pause.go_on.set()
        with pytest.raises(CephClientBlocklisted):
            await late
    assert _limit(ceph, controllers.namespace, volume_id) == "300"
    assert first.stores.volume_records.load(volume_id).io_limits.read_iops == 300


async def test_volume_is_not_grown_while_another_controller_changes_its_limits(
    controllers: Controllers, ceph: CephCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = controllers.start(), controllers.start()
    volume_id = await created(first, "a")
    grow = Change(expansion=Expansion(volumes.CapacityRange(128 * MIB, 0)))
    with paused(monkeypatch, "config_set") as pause:
        late = asyncio.create_task(_modify(first, volume_id, _limited(100))())
        assert await asyncio.to_thread(pause.reached.wait, 60)
        with pytest.raises(ChangedElsewhere, match=_address(first)):
            await _modify(second, volume_id, grow)()
        assert second.stores.provisioning.image_bytes(volume_id) == 64 * MIB
        pause.go_on.set()
        await late
    await _modify(second, volume_id, grow)()
    assert second.stores.provisioning.image_bytes(volume_id) == 128 * MIB
    record = first.stores.volume_records.load(volume_id)
    assert (record.capacity_bytes, record.io_limits.read_iops) == (128 * MIB, 100)
    assert _limit(ceph, controllers.namespace, volume_id) == "100"
