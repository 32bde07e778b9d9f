"""A controller that is paused between check and change, while its successor takes the pool over and goes on."""

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from crust.blockdriver.driver import Driver
from crust.blockdriver.engines.rbd.place import Place
from crust.blockdriver.snapshots.snapshot_sets import ContentChanged
from crust.ceph import binding
from crust.ceph.controller_lock import ControllerReplaced
from crust.ceph.failures import CephClientBlocklisted
from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.support.ceph.rbd_controllers import Controllers, created

DATA = b"of the second volume"
LIMITED = (("read_iops", 100),)


REFUSED = (CephClientBlocklisted, ControllerReplaced)


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


def _check_ends(driver: Driver) -> None:
    """No call is made by a new connection any more: the process ends."""
    with contextlib.suppress(*REFUSED):  # the one that finds it out
        driver.stores.provisioning.image_ids()
    with pytest.raises(ControllerReplaced):
        driver.stores.provisioning.image_ids()
    with pytest.raises(ControllerReplaced):
        driver.stores.pool.renew()


@pytest.mark.parametrize("has_snapshot", [False, True], ids=["trash_move", "rename"])
async def test_delete_paused_before_its_removal_keeps_the_volume_that_replaced_it(
    controllers: Controllers,
    ceph: CephCluster,
    monkeypatch: pytest.MonkeyPatch,
    has_snapshot: bool,  # noqa: FBT001
) -> None:
    first = controllers.start()
    volume_id = await created(first, "a")
    if has_snapshot:
        await first.controller.snapshots.create("s", volume_id)
    removal = "rename" if has_snapshot else "trash_move"
    with paused(monkeypatch, removal) as pause:
        late = asyncio.create_task(
            asyncio.to_thread(first.controller.provisioner.delete, volume_id)
        )
        assert await asyncio.to_thread(pause.reached.wait, 60)
        second = controllers.start()
        second.controller.provisioner.delete(volume_id)
        assert await created(second, "a") == volume_id
        _write(ceph, controllers.namespace, volume_id, DATA)
        pause.go_on.set()
        with pytest.raises(CephClientBlocklisted):
            await late
    assert _read(ceph, controllers.namespace, volume_id, len(DATA)) == DATA
    assert second.stores.volume_records.load(volume_id).volume_id == volume_id
    _check_ends(first)


async def test_no_call_of_a_change_is_made_by_a_connection_after_the_one_that_was_cut_off(
    controllers: Controllers, ceph: CephCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the calls of one change another thread may have found out, and may try to connect again."""
    from crust.blockdriver.engines.rbd.provisioning.images import VolumeImages

    first = controllers.start()
    volume_id = await created(first, "a")
    pause, delete = Pause(), VolumeImages.delete_image
    with monkeypatch.context() as patch:
        patch.setattr(VolumeImages, "delete_image", functools.partialmethod(_call, pause, delete))
        late = asyncio.create_task(
            asyncio.to_thread(first.controller.provisioner.delete, volume_id)
        )
        assert await asyncio.to_thread(pause.reached.wait, 60)
        second = controllers.start()
        second.controller.provisioner.delete(volume_id)
        await created(second, "a")
        _check_ends(first)
        pause.go_on.set()
        with pytest.raises(REFUSED):
            await late
    assert second.stores.provisioning.image_ids() == {volume_id}


async def test_paused_removal_of_a_snapshot_keeps_the_snapshot_that_replaced_it(
    controllers: Controllers, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = controllers.start()
    volume_id = await created(first, "a")
    deleting = first.controller.snapshots
    taken = await deleting.create("s", volume_id)
    with paused(monkeypatch, "remove_snap") as pause:
        late = asyncio.create_task(asyncio.to_thread(deleting.delete, taken.set_id))
        assert await asyncio.to_thread(pause.reached.wait, 60)
        second = controllers.start()
        taking = second.controller.snapshots
        await asyncio.to_thread(taking.delete, taken.set_id)
        again = await taking.create("s", volume_id)
        pause.go_on.set()
        with pytest.raises(CephClientBlocklisted):
            await late
    assert second.stores.provisioning.snapshot_ids() == {again.set_id}
    assert taking.find(again.set_id) == (again, again.snapshots[0])


async def test_create_paused_before_its_image_leaves_none_without_a_record(
    controllers: Controllers, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = controllers.start()
    with paused(monkeypatch, "create") as pause:
        late = asyncio.create_task(created(first, "a"))
        assert await asyncio.to_thread(pause.reached.wait, 60)
        second = controllers.start()
        volume_id = second.stores.pool.ids.volume_id("a")
        second.controller.provisioner.delete(volume_id)
        pause.go_on.set()
        with pytest.raises(CephClientBlocklisted):
            await late
    assert second.stores.provisioning.image_ids() == frozenset()
    assert await created(second, "a") == volume_id


async def test_snapshot_of_a_volume_that_a_node_was_given_meanwhile_is_not_answered(
    controllers: Controllers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would say that the volume was never written, and a volume made from it would be formatted."""
    driver = controllers.start()
    volume_id = await created(driver, "a")
    content, taking = driver.stores.content_records, driver.controller.snapshots
    with paused(monkeypatch, "create_snap") as pause:
        late = asyncio.create_task(taking.create("s", volume_id))
        assert await asyncio.to_thread(pause.reached.wait, 60)
        content.save(content.load(volume_id).but(in_guest=True))
        pause.go_on.set()
        with pytest.raises(ContentChanged, match="given to a node"):
            await late
    assert driver.stores.provisioning.snapshot_ids() == frozenset()
    assert (await taking.create("s", volume_id)).snapshots[0].in_guest


async def test_calls_of_one_controller_wait_for_each_other(controllers: Controllers) -> None:
    driver = controllers.start()
    volume_id = await created(driver, "a")
    taking = driver.controller.snapshots
    taken = [await taking.create(f"s{each}", volume_id) for each in range(8)]
    with driver.workers.used():
        await asyncio.gather(*(asyncio.to_thread(taking.delete, each.set_id) for each in taken))
    assert driver.stores.provisioning.snapshot_ids() == frozenset()


def _limit(ceph: CephCluster, namespace: str, image: str) -> str:
    """The limit of reads that the image has; empty for none."""
    import rbd

    with ceph.ioctx(POOL, namespace) as ioctx, rbd.Image(ioctx, image, read_only=True) as opened:
        try:
            return str(opened.config_get("rbd_qos_read_iops_limit"))
        except KeyError:
            return ""


async def test_limits_of_a_paused_controller_do_not_replace_newer_ones(
    controllers: Controllers, ceph: CephCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = controllers.start()
    volume_id = await created(first, "a")
    with paused(monkeypatch, "config_set") as pause:
        late = asyncio.create_task(first.controller.modifier.modify(volume_id, LIMITED))
        assert await asyncio.to_thread(pause.reached.wait, 60)
        second = controllers.start()
        await second.controller.modifier.modify(volume_id, (("read_iops", 300),))
        pause.go_on.set()
        with pytest.raises(REFUSED):
            await late
    assert _limit(ceph, controllers.namespace, volume_id) == "300"
    assert second.stores.volume_records.load(volume_id).limits.value.read_iops == 300
