"""The lock of a pool: who takes it and gives it back; a controller paused while its successor takes the pool over."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from crust.blockdriver.ceph import binding, controller_lock
from crust.blockdriver.ceph.binding import CephClientBlocklisted
from crust.blockdriver.ceph.connection import Connection
from crust.blockdriver.ceph.controller_lock import (
    PATIENCE_S,
    ControllerLock,
    ControllerReplaced,
    ControllerStandsBy,
)
from crust.blockdriver.driver import Driver
from crust.blockdriver.engines.rbd.provisioning.images import VolumeImages
from crust.blockdriver.pool_watch import PoolWatch
from crust.blockdriver.snapshots.snapshot_sets import ContentChanged
from crust.core import errors
from crust.core.supervised import Health
from examples.cluster.ceph_cluster import CephCluster
from tests.support.ceph.intercepted import Intercepted, before_calls
from tests.support.ceph.rbd_controllers import Controllers, connection_of, created
from tests.support.drivers.block_driver import DirectCo
from tests.support.raised import raised


def _value(driver: Driver) -> str:
    place = driver.stores.provisioning.place  # type: ignore[attr-defined]
    with place.ioctx("cannot look at the lock") as ioctx:
        return controller_lock.read(ioctx)


def _blocklisted(ceph: CephCluster) -> str:
    return ceph.command("osd blocklist ls").decode()


def _take(driver: Driver) -> None:
    home = driver.stores.pool
    home.find()
    home.lock()
    driver.open()


def _lock(driver: Driver) -> ControllerLock:
    lock = connection_of(driver).controller_lock
    assert lock is not None
    return lock


async def test_pool_of_silent_controller_is_taken_over_only_after_patience(
    controllers: Controllers, ceph: CephCluster
) -> None:
    first, second = controllers.start(), controllers.built()
    address = connection_of(first).address()
    with pytest.raises(ControllerStandsBy, match=address):
        _take(second)
    now_s = _lock(second)._since_s
    _lock(second).now_s = lambda: now_s
    for passed_s in (1.0, PATIENCE_S - 0.1):
        now_s = _lock(second)._since_s + passed_s
        with pytest.raises(ControllerStandsBy, match=address):
            _take(second)
    first.stores.pool.renew()  # it was only slow: the patience begins again
    now_s += 1
    with pytest.raises(ControllerStandsBy, match=address):
        _take(second)
    assert address not in _blocklisted(ceph)
    now_s += PATIENCE_S
    _take(second)
    assert address in _blocklisted(ceph)
    assert _value(second).split()[0] == connection_of(second).address()
    assert await created(second, "a") in second.stores.provisioning.image_ids()


async def test_lock_changes_hands_after_map_with_blocklisted_address_is_known(
    controllers: Controllers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An OSD that is asked by a client with an older map would still serve the late holder."""
    calls: list[str] = []
    controllers.start()
    connect, replace = binding.Binding.connection, controller_lock._replaced

    def replaced(*arguments: Any) -> bool:
        calls.append("swap")
        return replace(*arguments)

    def note(called: str) -> None:
        if called in ("blocklist_add", "wait_for_latest_osdmap"):
            calls.append(called)

    monkeypatch.setattr(
        binding.Binding, "connection", lambda *asked: Intercepted(connect(*asked), note)
    )
    monkeypatch.setattr(controller_lock, "_replaced", replaced)
    controllers.start()
    assert calls == ["blocklist_add", "wait_for_latest_osdmap", "swap"]


async def test_controller_started_again_in_its_run_directory_does_not_wait(
    controllers: Controllers, ceph: CephCluster
) -> None:
    """The lock of the directory says that its predecessor has ended; what that has sent may still arrive."""
    killed = controllers.built("run")
    _take(killed)
    address = connection_of(killed).address()
    again = controllers.built("run")
    _take(again)
    assert address in _blocklisted(ceph)
    assert _value(again).split()[0] == connection_of(again).address()


async def test_controller_that_stops_gives_the_lock_back(
    controllers: Controllers, ceph: CephCluster
) -> None:
    first, second = controllers.start(), controllers.built()
    address = connection_of(first).address()
    await created(first, "a")
    first.stores.pool.let_go()
    _take(second)
    assert address not in _blocklisted(ceph)


async def test_controller_stopped_after_unanswered_call_leaves_its_lock(
    controllers: Controllers, ceph: CephCluster
) -> None:
    """The call may be carried out when its successor is at work."""
    first, second = controllers.start(), controllers.built()
    await created(first, "a")
    address = connection_of(first).address()
    with ceph.osd.frozen(), raised("CephNotAnswering"):
        first.stores.provisioning.image_ids()
    first.stores.pool.let_go()
    with pytest.raises(ControllerStandsBy, match=address):
        _take(second)
    controllers.start()
    assert address in _blocklisted(ceph)


async def test_controller_whose_connection_is_still_in_use_leaves_the_lock(
    controllers: Controllers, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = controllers.start(), controllers.built()
    close = Connection.close
    with monkeypatch.context() as patch, first.stores.provisioning.place.ioctx("cannot wait"):  # type: ignore[attr-defined]
        patch.setattr(Connection, "close", lambda self: close(self, 0))
        first.stores.pool.let_go()
        with pytest.raises(ControllerStandsBy):
            _take(second)


async def test_standby_controller_is_healthy_and_serves_later(controllers: Controllers) -> None:
    first, second, health = controllers.start(), controllers.built(), Health()
    ended: list[errors.CrustError] = []
    watch = PoolWatch(second, health, ended.append)
    assert isinstance(await watch.look(), ControllerStandsBy)
    assert health.problems == {}
    with pytest.raises(ControllerStandsBy):
        watch.admit("/csi.v1.Controller/CreateVolume")
    assert not await DirectCo(second).is_ready()
    first.stores.pool.let_go()
    assert await watch.look() is None
    assert await DirectCo(second).is_ready()
    assert ended == []
    await watch.stop()
    await watch.let_go()


async def test_process_of_a_controller_that_was_replaced_ends(controllers: Controllers) -> None:
    first = controllers.built()
    ended: list[errors.CrustError] = []
    watch = PoolWatch(first, Health(), ended.append)
    assert await watch.look() is None
    controllers.start()
    while not ended:  # the first look finds its client cut off, the next one finds the lock
        await watch.look()
    assert isinstance(ended[0], ControllerReplaced)
    await watch.stop()
    await watch.let_go()


async def test_removed_lock_of_existing_pool_is_not_made_again(
    controllers: Controllers, tmp_path: Path
) -> None:
    """Its holder may still be at work."""
    first, second = controllers.start(), controllers.built()
    place = first.stores.provisioning.place  # type: ignore[attr-defined]
    with place.ioctx("cannot remove") as ioctx:
        ioctx.remove_object(controller_lock.OBJECT)
    with pytest.raises(errors.PeerUnavailable, match=controller_lock.OBJECT):
        _take(second)


DATA = b"of the second volume"
LIMITED = (("read_iops", 100),)


REFUSED = (CephClientBlocklisted, ControllerReplaced)


class Pause:
    """A call that waits until it is told to go on; the calls after the first do not."""

    def __init__(self) -> None:
        self._is_first = True
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def wait(self) -> None:
        if self._is_first:
            self._is_first = False
            self.reached.set()
            assert self.go_on.wait(60)

    @contextlib.asynccontextmanager
    async def of(
        self, work: Coroutine[Any, Any, Any], *refusals: type[Exception], match: str | None = None
    ) -> AsyncIterator[None]:
        """`work` waits while the block runs; then it goes on, and is refused."""
        late = asyncio.create_task(work)
        assert await asyncio.to_thread(self.reached.wait, 60)
        yield
        self.go_on.set()
        with pytest.raises(refusals, match=match):
            await late


@contextlib.contextmanager
def paused(patch: pytest.MonkeyPatch, name: str) -> Iterator[Pause]:
    """The first caller of a method of rbd.RBD or rbd.Image sleeps before it."""
    pause = Pause()
    with before_calls(patch, lambda called: pause.wait() if called == name else None):
        yield pause


def _check_ends(driver: Driver) -> None:
    """No call is made by a new connection any more: the process ends."""
    with contextlib.suppress(*REFUSED):  # the one that finds it out
        driver.stores.provisioning.image_ids()
    with pytest.raises(ControllerReplaced):
        driver.stores.provisioning.image_ids()
    with pytest.raises(ControllerReplaced):
        driver.stores.pool.renew()


@pytest.mark.parametrize("has_snapshot", [False, True], ids=["trash_move", "rename"])
async def test_delete_paused_before_its_removal_keeps_volume_that_replaced_it(
    controllers: Controllers, monkeypatch: pytest.MonkeyPatch, *, has_snapshot: bool
) -> None:
    first = controllers.start()
    volume_id = await created(first, "a")
    if has_snapshot:
        await first.controller.snapshots.create("s", volume_id)
    removal = "rename" if has_snapshot else "trash_move"
    delete = asyncio.to_thread(first.controller.provisioner.delete, volume_id)
    with paused(monkeypatch, removal) as pause:
        async with pause.of(delete, CephClientBlocklisted):
            second = controllers.start()
            second.controller.provisioner.delete(volume_id)
            assert await created(second, "a") == volume_id
            with controllers.image(volume_id) as image:
                image.write(DATA, 0)
    with controllers.image(volume_id) as image:
        assert image.read(0, len(DATA)) == DATA
    assert second.stores.volume_records.load(volume_id).volume_id == volume_id
    _check_ends(first)


async def test_change_is_not_continued_by_connection_after_cut_off(
    controllers: Controllers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the calls of one change another thread may have found out, and may try to connect again."""
    first = controllers.start()
    volume_id = await created(first, "a")
    pause, delete_image = Pause(), VolumeImages.delete_image

    def delete_late(*arguments: Any) -> Any:
        pause.wait()
        return delete_image(*arguments)

    delete = asyncio.to_thread(first.controller.provisioner.delete, volume_id)
    with monkeypatch.context() as patch:
        patch.setattr(VolumeImages, "delete_image", delete_late)
        async with pause.of(delete, *REFUSED):
            second = controllers.start()
            second.controller.provisioner.delete(volume_id)
            await created(second, "a")
            _check_ends(first)
    assert second.stores.provisioning.image_ids() == {volume_id}


async def test_paused_removal_of_snapshot_keeps_snapshot_that_replaced_it(
    controllers: Controllers, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = controllers.start()
    volume_id = await created(first, "a")
    deleting = first.controller.snapshots
    taken = await deleting.create("s", volume_id)
    delete = asyncio.to_thread(deleting.delete, taken.set_id)
    with paused(monkeypatch, "remove_snap") as pause:
        async with pause.of(delete, CephClientBlocklisted):
            second = controllers.start()
            taking = second.controller.snapshots
            await asyncio.to_thread(taking.delete, taken.set_id)
            again = await taking.create("s", volume_id)
    assert second.stores.provisioning.snapshot_ids() == {again.set_id}
    assert taking.find(again.set_id) == (again, again.snapshots[0])


async def test_create_paused_before_its_image_leaves_none_without_a_record(
    controllers: Controllers, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = controllers.start()
    with paused(monkeypatch, "create") as pause:
        async with pause.of(created(first, "a"), CephClientBlocklisted):
            second = controllers.start()
            volume_id = second.stores.pool.ids.volume_id("a")
            second.controller.provisioner.delete(volume_id)
    assert second.stores.provisioning.image_ids() == frozenset()
    assert await created(second, "a") == volume_id


async def test_snapshot_of_volume_given_to_node_meanwhile_is_not_answered(
    controllers: Controllers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would say that the volume was never written, and a volume made from it would be formatted."""
    driver = controllers.start()
    volume_id = await created(driver, "a")
    content, taking = driver.stores.content_records, driver.controller.snapshots
    with paused(monkeypatch, "create_snap") as pause:
        late = taking.create("s", volume_id)
        async with pause.of(late, ContentChanged, match="given to a node"):
            content.save(content.load(volume_id).replaced(in_guest=True))
    assert driver.stores.provisioning.snapshot_ids() == frozenset()
    assert (await taking.create("s", volume_id)).snapshots[0].in_guest


async def test_calls_of_one_controller_wait_for_each_other(controllers: Controllers) -> None:
    driver = controllers.start()
    volume_id = await created(driver, "a")
    taking = driver.controller.snapshots
    sets = [await taking.create(f"s{number}", volume_id) for number in range(8)]
    with driver.workers.used():
        await asyncio.gather(*(asyncio.to_thread(taking.delete, kept.set_id) for kept in sets))
    assert driver.stores.provisioning.snapshot_ids() == frozenset()


async def test_limits_of_a_paused_controller_do_not_replace_newer_ones(
    controllers: Controllers, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = controllers.start()
    volume_id = await created(first, "a")
    with paused(monkeypatch, "config_set") as pause:
        async with pause.of(first.controller.modifier.modify(volume_id, LIMITED), *REFUSED):
            second = controllers.start()
            await second.controller.modifier.modify(volume_id, (("read_iops", 300),))
    with controllers.image(volume_id) as image:
        assert str(image.config_get("rbd_qos_read_iops_limit")) == "300"
    assert second.stores.volume_records.load(volume_id).limits.value.read_iops == 300
