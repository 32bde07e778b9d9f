"""The driver on a real Ceph pool: killed at every step, a successor, a cluster that hangs or restarts."""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from crust.blockdriver.ceph import omap
from crust.blockdriver.ceph.binding import CephMonitorsUnreachable
from crust.blockdriver.ceph.user import Timeouts
from crust.blockdriver.controller.create_volume import Create
from crust.blockdriver.driver import Driver
from crust.blockdriver.engines.rbd.provisioning.images import DELETED, user_snapshots
from crust.blockdriver.snapshots.content_source import SourceRequest
from crust.core import errors, volumes
from examples.cluster import ceph_cluster
from examples.cluster.ceph_cluster import CephCluster
from tests.support.ceph.intercepted import before_calls
from tests.support.ceph.rbd_controllers import RAW, SIZE, Controllers, created
from tests.support.faults.crashes import Killed

MIB = 1024**2
TWICE = volumes.CapacityRange(2 * SIZE.required_bytes, 0)
PATIENT = Timeouts(connect_s=30, monitors_s=30, data_s=30)
"""On a busy machine a cluster that answers may take longer than `rbd_controllers.QUICK`."""


_READS = frozenset({
    "diff_iterate", "features", "flags", "get_parent_image_spec", "id", "list2", "list_lockers", "list_snaps",
    "metadata_list", "set_snap", "set_snap_by_id", "size", "stat", "trash_list", "watchers_list",
})  # fmt: skip
"""They change nothing, so a kill before one is the same as a kill before the next change."""


@contextlib.contextmanager
def killed_at(number: int, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Die before the nth call of librados or librbd inside the block; no call comes after it."""
    calls, operate = itertools.count(1), omap._operate

    def step(name: str) -> None:
        if name not in _READS and next(calls) >= number:
            raise Killed

    def counted(*arguments: Any) -> None:
        step("operate")
        operate(*arguments)

    with before_calls(patch, step), patch.context() as patching:
        patching.setattr(omap, "_operate", counted)
        yield


Work = Callable[[Driver, volumes.VolumeId, str], Awaitable[object]]

_WORKS: dict[str, Work] = {
    "create": lambda driver, *_: created(driver, "new"),
    "clone": lambda driver, source, _: created(driver, "new", SourceRequest("volume", source)),
    "restore": lambda driver, _, snapshot: created(
        driver, "new", SourceRequest("snapshot", snapshot)
    ),
    "snapshot": lambda driver, source, _: driver.controller.snapshots.create("new", source),
    "group": lambda driver, source, _: _group(driver, source),
    "delete group": lambda driver, source, _: _delete_group(driver, source),
    "delete": lambda driver, source, _: asyncio.to_thread(
        driver.controller.provisioner.delete, source
    ),
    "delete both": lambda driver, source, snapshot: _delete_both(driver, source, snapshot),
    "expand": lambda driver, source, _: asyncio.to_thread(
        driver.controller.modifier.expand, source, TWICE
    ),
}


async def _group(driver: Driver, source: volumes.VolumeId) -> list[str]:
    """The snapshots of a group of two volumes."""
    other = await created(driver, "other")
    group = await driver.controller.snapshots.create_group("group", [source, other])
    return [snapshot.snapshot_id for snapshot in group.snapshots]


async def _delete_group(driver: Driver, source: volumes.VolumeId) -> None:
    members = await _group(driver, source)
    driver.controller.snapshots.delete_group(driver.stores.pool.ids.group_id("group"), members)


async def _delete_both(driver: Driver, source: volumes.VolumeId, snapshot: str) -> None:
    """The image of the volume is kept for its snapshot, and goes with it."""
    driver.controller.provisioner.delete(source)
    driver.controller.snapshots.delete(snapshot)


@pytest.mark.parametrize("name", _WORKS)
async def test_killed_before_any_call_the_next_controller_finishes_it(
    name: str, ceph: CephCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, is_done = 0, False
    while not is_done:
        number += 1
        controllers = Controllers(ceph, tmp_path, timeouts=PATIENT)
        try:
            driver = controllers.start()
            driver.stores.engine.provisioning.stop()  # type: ignore[attr-defined]
            source = await created(driver, "source")
            snapshot = (await driver.controller.snapshots.create("snapshot", source)).set_id
            with killed_at(number, monkeypatch), contextlib.suppress(Killed):
                await _WORKS[name](driver, source, snapshot)
                is_done = True
            again = controllers.start()
            await _WORKS[name](again, source, snapshot)
            await _check_whole(again, name)
        finally:
            controllers.end()
    assert number > 3, "it was killed somewhere"


async def _check_whole(driver: Driver, name: str) -> None:
    """Every volume on record is healthy, every image and snapshot has a record."""
    health = driver.controller.health_check
    for volume_id in health.ids():
        assert not health.examine(volume_id).findings, name
    recorded = {snapshot.snapshot_id for _, snapshot in driver.controller.snapshots.page("", "")}
    assert driver.stores.provisioning.snapshot_ids() == recorded, name
    assert driver.stores.provisioning.unsettled() == (), name
    place = driver.stores.engine.provisioning.place  # type: ignore[attr-defined]
    with place.ioctx("cannot list what is kept") as ioctx:
        for image_name in place.names(ioctx):
            if image_name.startswith(DELETED):
                with place.image(ioctx, image_name) as image:
                    assert user_snapshots(image), f"{name}: {image_name} is kept for nothing"


async def test_successor_keeps_predecessors_work_and_discards_its_unfinished_work(
    controllers: Controllers,
) -> None:
    first = controllers.start()
    volume_id = await created(first, "a")
    taken = await first.controller.snapshots.create("s", volume_id)
    begun = first.stores.pool.ids.snapshot_id("begun")
    first.stores.provisioning.set_records.begin(begun)  # type: ignore[attr-defined]
    second = controllers.start()
    assert second.stores.volume_records.index.page() == (volume_id,)
    assert await created(second, "a") == volume_id
    assert second.controller.snapshots.find(taken.set_id) == (taken, taken.snapshots[0])
    assert second.stores.provisioning.unsettled() == ()


async def test_64_creates_at_once_make_64_volumes(controllers: Controllers) -> None:
    driver = controllers.start()
    names = [f"volume {number}" for number in range(64)]
    with driver.workers.used():
        made = await asyncio.gather(*(created(driver, name) for name in names))
    assert len(set(made)) == 64
    assert driver.stores.provisioning.image_ids() == frozenset(made)


async def test_limits_are_the_images_and_a_copy_has_its_own(controllers: Controllers) -> None:
    driver = controllers.start()
    request = Create("a", SIZE, RAW, limits=(("write_iops", 100),))
    source = (await driver.controller.provisioner.create(request)).volume_id
    copy = await created(driver, "b", SourceRequest("volume", source))
    assert _configured(controllers, source) == {"rbd_qos_write_iops_limit": "100"}
    assert _configured(controllers, copy) == {}
    changes = (("write_iops", 0), ("read_bytes_per_second", 4096))
    await driver.controller.modifier.modify(source, changes)
    assert _configured(controllers, source) == {"rbd_qos_read_bps_limit": "4096"}


def _configured(controllers: Controllers, name: str) -> dict[str, str]:
    with controllers.image(name) as image:
        metadata = dict(image.metadata_list())
    return {key[5:]: value for key, value in metadata.items() if key.startswith("conf_")}


async def _eventually(
    call: Callable[[], Awaitable[volumes.VolumeId]], unless: str
) -> volumes.VolumeId:
    """The managers report a new pool some seconds later."""
    while True:
        try:
            return await call()
        except errors.CrustError as err:
            if err.error_name != unless:
                raise


async def test_calls_below_frozen_cluster_are_unavailable_and_leave_nothing(
    controllers: Controllers, ceph: CephCluster
) -> None:
    driver = controllers.start()
    await created(driver, "a")
    driver.stores.provisioning._space_at_s = 0  # type: ignore[attr-defined]
    with ceph.mon.frozen(), pytest.raises(CephMonitorsUnreachable):
        await created(driver, "b")
    with ceph.osd.frozen(), pytest.raises(errors.PeerUnavailable):
        await created(driver, "b")
    await created(driver, "b")
    await _check_whole(driver, "frozen")


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephCluster]:
    """A cluster that keeps its data when it is restarted."""
    directory = tmp_path_factory.mktemp("ceph") / "b"
    with ceph_cluster.running(directory, store="bluestore", with_mgr=True) as cluster:
        yield cluster


async def test_restarted_cluster_is_served_again_without_restart_of_driver(
    lasting: CephCluster, tmp_path: Path
) -> None:
    controllers = Controllers(lasting, tmp_path)
    try:
        driver = controllers.start()
        first = await _eventually(lambda: created(driver, "a"), "CephStatisticsMissing")
        await asyncio.to_thread(lasting.restart)
        lasting.start("mgr")
        assert await created(driver, "a") == first
        await _eventually(lambda: created(driver, "b"), "CephStatisticsMissing")
        await _check_whole(driver, "restart")
    finally:
        controllers.end()
