"""A node without any key of its own: each volume's user comes with the calls, and a restart forgets it."""

import asyncio
import re
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from crust.blockdriver.engines.rbd.node import volume_users
from crust.blockdriver.engines.rbd.node.volume_users import VolumeUsers
from crust.blockdriver.engines.rbd.provisioning.images import VolumeImages
from crust.core.volumes import VolumeId
from crust.rpc.messages import csi
from crust.wire.csi.v1 import csi_pb2
from examples.cluster.ceph_cluster import POOL
from tests.support.ceph.rbd_node import SIZE, RbdNode
from tests.support.co import capability
from tests.support.faults.refusals import refused

NOT_READY = grpc.StatusCode.FAILED_PRECONDITION


async def test_node_without_a_key_refuses_a_stage_with_the_remedy(node: RbdNode) -> None:
    volume = await node.create("one")
    info = await node.co.node.NodeGetInfo(csi_pb2.NodeGetInfoRequest())
    assert info.node_id == "node-of-the-tests"
    asked = csi_pb2.NodeGetCapabilitiesRequest()
    assert (await node.co.node.NodeGetCapabilities(asked)).capabilities
    await refused(node.stage(volume, {}), NOT_READY, "CephKeyMissing", "node-stage-secret-name")
    assert node.notes() == []
    await node.leave(volume)


async def test_life_of_a_volume_with_a_restart_between_its_steps(node: RbdNode) -> None:
    volume, secrets = await node.create("one"), node.secrets("guest")
    await node.stage(volume, secrets)
    assert node.notes() == [volume]
    await node.restart()
    await refused(node.publish(volume, {}), NOT_READY, "CephKeyMissing", "node-publish-secret-name")
    answer = await node.publish(volume, secrets)
    assert answer.secrets["userKey"] == secrets["userKey"]
    assert csi.deferred_mount(answer).image is not None
    await node.restart()
    await refused(node.co.stats(volume, str(node.target(volume))), NOT_READY, "CephKeyNotGiven")
    await refused(node.expand(volume, {}), NOT_READY, "CephKeyMissing")
    assert await node.expand(volume, secrets) >= SIZE
    await refused(
        node.co.stats(volume, str(node.target(volume))), NOT_READY, "VolumeMountedInGuest"
    )
    await node.restart()
    await node.unpublish(volume)
    await node.restart()
    await node.unstage(volume)
    assert node.notes() == []
    node.check_no_key_anywhere()


async def test_wrong_key_takes_no_place_of_a_right_one(node: RbdNode) -> None:
    volume, other = await node.create("one"), await node.create("two")
    secrets = node.secrets("guest")
    wrong = {**node.secrets("stranger"), "userID": secrets["userID"]}
    code = grpc.StatusCode.PERMISSION_DENIED
    await refused(node.stage(volume, wrong), code, "CephKeyRefused")
    await refused(node.stage(volume, {}), NOT_READY, "CephKeyMissing")
    await node.stage(volume, secrets)
    await refused(node.stage(other, wrong), code, "CephKeyRefused")
    assert node.notes() == [volume]
    answer = await node.publish(volume, secrets)
    assert answer.secrets["userKey"] == secrets["userKey"]
    node.check_no_key_anywhere()


async def test_unstage_needs_no_key_that_the_cluster_accepts(node: RbdNode) -> None:
    volume, secrets = await node.create("one"), node.secrets("guest")
    await node.stage(volume, secrets)
    await node.restart()
    node.ceph.command("auth rm", entity=f"client.{secrets['userID']}")
    await refused(
        node.publish(volume, secrets), grpc.StatusCode.PERMISSION_DENIED, "CephKeyRefused"
    )
    await node.leave(volume)
    assert node.notes() == []


async def test_users_of_volumes_go_with_their_last_volume(node: RbdNode) -> None:
    volumes = [await node.create(name) for name in ("one", "two", "three")]
    users = [node.secrets("a"), node.secrets("b")]
    pairs = list(zip(volumes, (users[0], users[1], users[0]), strict=True))
    for volume, secrets in pairs:
        await node.stage(volume, secrets)
        image = csi.deferred_mount(await node.publish(volume, secrets)).image
        assert image is not None
        assert image.user == secrets["userID"]
    names = [user["userID"] for user in users]
    await node.until_connected_as(*names)
    for volume in volumes[:2]:
        await node.leave(volume)
    await node.until_connected_as(names[0])
    await node.leave(volumes[2])
    await node.until_connected_as()
    node.check_no_key_anywhere()


async def test_key_that_was_changed_takes_place_of_old_one(node: RbdNode) -> None:
    volume, before = await node.create("one"), node.secrets("guest")
    await node.stage(volume, before)
    node.ceph.command("auth rm", entity=f"client.{before['userID']}")
    after = node.secrets("guest")
    assert after != before
    answer = await node.publish(volume, after)
    assert answer.secrets["userKey"] == after["userKey"]
    await node.leave(volume)


async def test_connections_are_bounded_and_opened_again_for_their_volumes(
    node: RbdNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume_users, "MOST_OPEN", 1)
    volumes = [VolumeId(await node.create(name)) for name in ("one", "two")]
    users = VolumeUsers(node.ceph.monitors, POOL, node.namespace, str)
    try:
        for volume, secrets in zip(volumes, (node.secrets("a"), node.secrets("b")), strict=True):
            await asyncio.to_thread(users.use, volume, secrets)
            await node.until_connected_as(secrets["userID"])
        images = VolumeImages(users.place(volumes[0]))
        assert await asyncio.to_thread(images.own_size_bytes, volumes[0]) >= SIZE
    finally:
        await asyncio.to_thread(users.let_go)
    await node.until_connected_as()


PAGE = Path(__file__).parents[3] / "docs" / "ceph.md"
Mode = csi_pb2.VolumeCapability.AccessMode.Mode


@dataclass(frozen=True)
class Row:
    """What is said of one mode: "OK", or the name of the error."""

    kind: str
    mode: str
    create: str
    stage: str
    deferred: str
    on_host: str

    def capability(self) -> csi_pb2.VolumeCapability:
        return capability(block=self.kind == "raw", mode=self.mode)


def rows() -> Iterator[Row]:
    """The rows of the page, one per mode."""
    text = PAGE.read_text(encoding="utf-8").partition("## Access modes\n")[2].partition("\n##")[0]
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in ("filesystem", "raw"):
            for mode in cells[1].split(", "):
                yield Row(cells[0], mode, *cells[2:6])


def test_page_has_every_mode_of_both_kinds_once() -> None:
    modes = [mode for mode in Mode.keys() if mode != "UNKNOWN"]  # noqa: SIM118 - no mapping
    shown = [(row.kind, row.mode) for row in rows()]
    assert sorted(shown) == sorted((kind, mode) for kind in ("filesystem", "raw") for mode in modes)


async def answered(call: Awaitable[Any]) -> str:
    """ "OK", or the name of the error."""
    try:
        await call
    except grpc.aio.AioRpcError as err:
        text = err.details() or "no text"
        name = re.search(r"\[(\w+)[],]", text)
        return name[1] if name else text
    return "OK"


async def test_each_call_answers_what_page_says_and_nothing_is_left(cluster: RbdNode) -> None:
    await cluster.leave()  # the volume that the fixture has made
    differing = []
    for row in rows():
        name, given = f"{row.kind}-{row.mode}", row.capability()
        create = await answered(cluster.create(name, given))
        usual = (
            given
            if create == "OK"
            else Row(row.kind, "SINGLE_NODE_WRITER", *4 * ("",)).capability()
        )
        volume = await cluster.create(name, usual)
        assert await cluster.is_confirmed(volume, given) == (create == "OK"), row
        stage = await answered(cluster.stage(volume, given=given))
        deferred = await answered(cluster.publish(volume, cluster.own, given))
        await cluster.unpublish(volume)
        on_host = await answered(cluster.publish(volume, cluster.own, given, deferred=False))
        answers = Row(row.kind, row.mode, create, stage, deferred, on_host)
        if answers != row:
            differing.append((answers, row))
        assert not cluster.target(volume).exists()
        await cluster.leave(volume)
    assert differing == []
    assert cluster.images() == []


async def test_guest_gets_image_to_format_with_key_of_stage(cluster: RbdNode) -> None:
    await cluster.stage()
    answer = csi.deferred_mount(await cluster.publish())
    assert answer.image is not None
    assert answer.image.cluster == cluster.ceph.fsid
    assert (answer.image.pool, answer.image.namespace) == (POOL, cluster.namespace)
    assert answer.image.image in cluster.images()
    assert answer.image.user == cluster.own["userID"]
    assert answer.secrets == {"userKey": cluster.own["userKey"]}
    assert answer.format is not None
    assert answer.capacity_bytes >= SIZE
    await cluster.leave()
    assert cluster.images() == []


async def test_node_answers_the_size_of_the_grown_image(cluster: RbdNode) -> None:
    await cluster.stage()
    await cluster.publish()
    await cluster.grow()
    assert await cluster.expand(size=2 * SIZE) == 2 * SIZE
    await cluster.leave()
