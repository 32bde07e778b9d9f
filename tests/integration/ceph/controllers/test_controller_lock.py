"""The lock of a pool: who takes it, after what, and who gives it back, on a real cluster."""

from pathlib import Path
from typing import Any

import pytest

from crust.blockdriver.driver import Driver
from crust.blockdriver.pool_watch import PoolWatch
from crust.ceph import binding, controller_lock
from crust.ceph.connection import Connection
from crust.ceph.controller_lock import (
    PATIENCE_S,
    ControllerLock,
    ControllerReplaced,
    ControllerStandsBy,
)
from crust.core import errors
from crust.core.supervised import Health
from crust.wire.csi.v1 import csi_pb2
from examples.cluster.ceph_cluster import CephCluster
from tests.support.ceph.intercepted import Intercepted
from tests.support.ceph.rbd_controllers import Controllers, connection_of, created
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
    found = connection_of(driver).controller_lock
    assert found is not None
    return found


async def test_pool_of_a_silent_controller_is_taken_over_after_the_patience_and_not_before(
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


async def test_lock_changes_hands_after_the_map_with_the_blocklisted_address_is_known(
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


async def test_controller_that_stops_after_an_unanswered_call_leaves_the_lock_to_be_cut_off(
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
        watch.check("/csi.v1.Controller/CreateVolume")
    context: Any = _Context()
    probed = await second.identity.Probe(csi_pb2.ProbeRequest(), context)
    assert not probed.ready.value
    first.stores.pool.let_go()
    assert await watch.look() is None
    probed = await second.identity.Probe(csi_pb2.ProbeRequest(), context)
    assert probed.ready.value
    assert ended == []
    await watch.stop()
    await watch.let_go()


class _Context:
    """Of a caller that knows no extension."""

    metadata: tuple[()] = ()


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


async def test_lock_of_an_existing_pool_that_was_removed_is_not_made_again(
    controllers: Controllers, tmp_path: Path
) -> None:
    """Its holder may still be at work."""
    first, second = controllers.start(), controllers.built()
    place = first.stores.provisioning.place  # type: ignore[attr-defined]
    with place.ioctx("cannot remove") as ioctx:
        ioctx.remove_object(controller_lock.OBJECT)
    with pytest.raises(errors.PeerUnavailable, match=controller_lock.OBJECT):
        _take(second)
