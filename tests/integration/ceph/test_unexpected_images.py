"""Images with a volume's name that crust did not make, and a controller that is cut off while it makes one.

By the controller's socket, on a real cluster: the code and the name of the error, and that nobody's data is touched.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import rbd

from crust.blockdriver.ceph import omap
from crust.blockdriver.engines.pool_access import RecordKind
from crust.blockdriver.engines.rbd.records import object_name
from tests.support.ceph.rbd_node import SIZE, RbdNode
from tests.support.faults.refusals import refused, repeated

DATA = b"somebody's"
LOSS = grpc.StatusCode.DATA_LOSS


def put_foreign(cluster: RbdNode, name: str) -> str:
    """Somebody makes an image of that name, in place of the one that is there, and writes to it; its id."""
    with cluster.ioctx() as ioctx:
        if name in rbd.RBD().list(ioctx):
            rbd.RBD().remove(ioctx, name)
        rbd.RBD().create(ioctx, name, SIZE)
        with rbd.Image(ioctx, name) as image:
            image.write(DATA, 0)
            return str(image.id())


def check_untouched(cluster: RbdNode, name: str, image_id: str) -> None:
    with cluster.ioctx() as ioctx, rbd.Image(ioctx, name, read_only=True) as image:
        assert (image.id(), image.size(), image.read(0, len(DATA))) == (image_id, SIZE, DATA)
        assert dict(image.metadata_list()) == {}


def interrupt_create(cluster: RbdNode, volume_id: str) -> None:
    """Note the volume as one of a controller that was killed before it made the image."""
    name, dropped = object_name(RecordKind.VOLUMES), (f"d.{volume_id}", f"v.{volume_id}")
    after: dict[str, bytes | None] = {f"i.{volume_id}": b"make", **dict.fromkeys(dropped)}
    with cluster.ioctx() as ioctx:
        omap.swap(ioctx, name, {}, after)


async def test_image_without_record_stops_its_create_and_is_not_touched(
    cluster: RbdNode,
) -> None:
    volume_id = cluster.volume
    await cluster.delete(volume_id)
    image_id = put_foreign(cluster, volume_id)
    for _ in range(2):
        await refused(cluster.create("one"), LOSS, "[OrphanImage]", "`rbd rename`")
        await cluster.delete(volume_id)  # there is no such volume
        check_untouched(cluster, volume_id, image_id)
    with cluster.ioctx() as ioctx:
        rbd.RBD().rename(ioctx, volume_id, "theirs")
    assert await cluster.create("one") == volume_id
    await cluster.delete(volume_id)
    check_untouched(cluster, "theirs", image_id)


async def test_image_made_during_interrupted_create_is_not_taken_nor_deleted(
    cluster: RbdNode,
) -> None:
    volume_id = cluster.volume
    interrupt_create(cluster, volume_id)
    image_id = put_foreign(cluster, volume_id)
    for _ in range(2):
        await refused(cluster.create("one"), LOSS, "[ForeignImage]", "is not deleted", "rename")
        await refused(cluster.delete(volume_id), LOSS, "[ForeignImage]", "is not deleted")
        check_untouched(cluster, volume_id, image_id)
    with cluster.ioctx() as ioctx:
        rbd.RBD().rename(ioctx, volume_id, "theirs")
    await cluster.create("one")
    await cluster.delete(volume_id)
    assert cluster.images() == ["theirs"]
    check_untouched(cluster, "theirs", image_id)


async def test_image_in_volumes_place_is_deleted_only_once_adopted(
    cluster: RbdNode,
) -> None:
    """Somebody else's, or restored from a backup: nobody but a person knows."""
    volume_id = cluster.volume
    image_id = put_foreign(cluster, volume_id)
    for _ in range(2):
        remedy = "`rbd image-meta set IMAGE crust.volume VOLUME`"
        await refused(cluster.delete(volume_id), LOSS, "[ForeignImage]", remedy)
        check_untouched(cluster, volume_id, image_id)
    await refused(cluster.create("one"), LOSS, "[ForeignImage]", "is not used")
    with cluster.ioctx() as ioctx, rbd.Image(ioctx, volume_id) as image:
        image.metadata_set("crust.volume", volume_id)
    assert await cluster.create("one") == volume_id, "it is ready as before"
    await cluster.delete(volume_id)
    assert cluster.images() == []


async def test_controller_blocklisted_while_it_creates_makes_each_volume_once(
    cluster: RbdNode,
) -> None:
    names: list[str] = []
    user = f"controller-{cluster.namespace}"
    assert user in cluster.ceph.connected_users()
    while not await refused_while_blocklisted(cluster, user, names):
        pass  # the controller's own look at the pool was the first to meet it, and connected again
    made = [
        await repeated(partial(cluster.create, name), grpc.StatusCode.UNAVAILABLE) for name in names
    ]
    assert sorted(cluster.images()) == sorted([*made, cluster.volume])
    for volume_id in made:
        await cluster.delete(volume_id)
    assert cluster.images() == [cluster.volume]


async def refused_while_blocklisted(cluster: RbdNode, user: str, names: list[str]) -> bool:
    """Create volumes, whose names are added, while the user's client is blocklisted; whether one was refused."""
    (address,) = cluster.ceph.clients_of(user)
    blocklist = partial(cluster.ceph.command, "osd blocklist", blocklistop="add", addr=address)
    blocklisting = asyncio.ensure_future(asyncio.to_thread(blocklist))
    was_refused = is_last = False
    while not (was_refused or is_last):
        is_last = blocklisting.done()
        new = [f"volume {len(names) + number}" for number in range(8)]
        names += new
        calls = (cluster.create(name) for name in new)
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, grpc.aio.AioRpcError):
                assert answer.code() is grpc.StatusCode.UNAVAILABLE, answer
                assert "has blocklisted this client" in str(answer.details())
                was_refused = True
            else:
                assert not isinstance(answer, BaseException), answer
    await blocklisting
    return was_refused


MODIFIED = {"readIOPS": "500"}


def remove_image(cluster: RbdNode, name: str) -> None:
    with cluster.ioctx() as ioctx:
        rbd.RBD().remove(ioctx, name)


def remove_snapshot(cluster: RbdNode, volume_id: str, snapshot_id: str) -> None:
    with cluster.ioctx() as ioctx, rbd.Image(ioctx, volume_id) as image:
        image.remove_snap(snapshot_id)


def records(cluster: RbdNode, kind: RecordKind) -> list[str]:
    with cluster.ioctx() as ioctx:
        return [key for key, _ in omap.read(ioctx, object_name(kind), "d.")]


async def test_volume_without_its_image_is_lost_and_not_remade(cluster: RbdNode) -> None:
    volume_id, other = cluster.volume, await cluster.create("other")
    await cluster.stage()
    await cluster.publish()
    remove_image(cluster, volume_id)
    for _ in range(2):
        calls: list[Callable[[], Any]] = [
            lambda: cluster.create("one"),
            lambda: cluster.create("clone", size=2 * SIZE, volume=volume_id),
            lambda: cluster.expand(size=2 * SIZE),
            cluster.is_confirmed,
            cluster.stage,
            cluster.publish,
            lambda: cluster.controller.modify(cluster.volume, **MODIFIED),
            cluster.grow,
            cluster.snapshot,
        ]
        for call in calls:
            await refused(call(), LOSS, "[ImageMissing]", volume_id, "delete the volume")
        differing = cluster.create("one", size=4 * SIZE)
        await refused(differing, grpc.StatusCode.ALREADY_EXISTS, "[VolumeExistsDifferently]")
        listed = await cluster.controller.volumes()
        assert {key: entry.status.volume_condition.abnormal for key, entry in listed.items()} == {
            volume_id: True,
            other: False,
        }
        assert cluster.images() == [other]
    assert records(cluster, RecordKind.SNAPSHOTS) == []
    await cluster.leave()  # the pod ends, and its claim is deleted
    assert records(cluster, RecordKind.VOLUMES) == [other]
    assert await cluster.create("one") == volume_id, "after its end it is new"
    await cluster.delete(volume_id)


async def test_foreign_image_in_volumes_place_is_used_by_no_call(cluster: RbdNode) -> None:
    volume_id = cluster.volume
    image_id = put_foreign(cluster, volume_id)
    for call in (
        lambda: cluster.create("one"),
        cluster.is_confirmed,
        lambda: cluster.controller.modify(cluster.volume, **MODIFIED),
        cluster.grow,
        cluster.snapshot,
        cluster.stage,
    ):
        await refused(call(), LOSS, "[ForeignImage]", volume_id, "`rbd image-meta set")
        check_untouched(cluster, volume_id, image_id)


async def test_vanished_snapshot_is_lost_to_retry_and_restore(cluster: RbdNode) -> None:
    volume_id = cluster.volume
    taken = await cluster.snapshot()
    copy = await cluster.create("copy", snapshot=taken)
    await cluster.delete(copy)
    remove_snapshot(cluster, volume_id, taken)
    for _ in range(2):
        calls: list[Callable[[], Any]] = [
            cluster.snapshot,
            lambda: cluster.create("new", snapshot=taken),
        ]
        for call in calls:
            await refused(call(), LOSS, "[SnapshotMissing]", taken, "delete the snapshot")
        assert cluster.images() == [volume_id]
    assert len(records(cluster, RecordKind.VOLUMES)) == 1
    for _ in range(2):
        await cluster.controller.delete_snapshot(taken)
    assert records(cluster, RecordKind.SNAPSHOTS) == []
    assert await cluster.snapshot() == taken, "after its end it is new"
    with cluster.ioctx() as ioctx:
        with rbd.Image(ioctx, volume_id) as image:
            for snap in list(image.list_snaps()):
                image.remove_snap(snap["name"])
        rbd.RBD().remove(ioctx, volume_id)
    await refused(cluster.snapshot(), LOSS, "[SnapshotMissing]", taken)
    await cluster.controller.delete_snapshot(taken)
    await cluster.delete(volume_id)
    assert records(cluster, RecordKind.SNAPSHOTS) == records(cluster, RecordKind.VOLUMES) == []


async def test_group_with_a_vanished_member_can_be_deleted(cluster: RbdNode) -> None:
    other = await cluster.create("other")
    made = await cluster.controller.group(cluster.volume, other)
    lost = next(snapshot for snapshot in made.snapshots if snapshot.source_volume_id == other)
    remove_snapshot(cluster, other, lost.snapshot_id)
    for _ in range(2):
        call = cluster.controller.group(cluster.volume, other)
        await refused(call, LOSS, "[SnapshotMissing]", lost.snapshot_id, "delete")
    for _ in range(2):
        await cluster.controller.delete_group(made)
    assert records(cluster, RecordKind.SNAPSHOTS) == []
