"""Device reservations: one writer per device and volume, and no host mount of a deferred volume."""

import asyncio

import grpc
import pytest

from crust.core import volumes
from crust.host.block import in_use
from crust.host.block.device_sets import DeviceSet
from crust.host.mounts import mountinfo
from tests.support.drivers.fake_driver import Gate
from tests.support.faults.refusals import refused
from tests.support.nodes.node import Node, until
from tests.support.raised import raised

Code = grpc.StatusCode


@pytest.mark.spec("D-21")
async def test_a_second_target_of_the_volume_is_refused_naming_the_holder(kata: Node) -> None:
    one, two = kata.places.target("one"), kata.places.target("two")
    await kata.co.publish("vol-1", one)
    await refused(
        kata.co.publish("vol-1", two), Code.FAILED_PRECONDITION, "vol-1", one, "for writing", "stop"
    )
    assert len(kata.driver.called("NodePublishVolume")) == 1
    kata.check_published("vol-1", one)
    assert kata.entry(two) is None
    assert not kata.targets.has_guard(volumes.TargetPath(two))


async def test_two_volumes_with_one_device_share_one_reservation(kata: Node) -> None:
    """The driver's answer reveals the device of the second volume, and its publish is undone."""
    one, two = kata.places.target("one"), kata.places.target("two")
    kata.driver.identities.update({"vol-1": (7, 3, 9), "vol-2": (7, 3, 9)})
    await kata.co.publish("vol-1", one)
    await refused(kata.co.publish("vol-2", two), Code.FAILED_PRECONDITION, "vol-2", one)
    assert kata.entry(two) is None
    assert two not in kata.driver.published


async def test_device_that_the_driver_misreports_is_refused(kata: Node, target: str) -> None:
    kata.driver.alter = lambda answer: setattr(answer.block_device.identity, "disk_sequence", 77)
    await refused(kata.co.publish("vol-1", target), Code.INTERNAL, "the driver reports", "@77")
    kata.check_untouched(target)


async def test_device_that_is_not_there_is_refused(kata: Node, target: str) -> None:
    kata.driver.alter = lambda answer: setattr(answer.block_device, "path", "/nowhere/vol-1")
    await refused(kata.co.publish("vol-1", target), Code.INTERNAL, "there is no /nowhere/vol-1")
    kata.check_untouched(target)


async def test_volume_on_a_partition_of_a_published_disk_is_refused(kata: Node) -> None:
    one, two = kata.places.target("one"), kata.places.target("two")
    kata.driver.identities.update({"vol-1": (8, 0, 9), "vol-2": (8, 1, 9)})
    disk, partition = volumes.DeviceIdentity(8, 0, 9), volumes.DeviceIdentity(8, 1, 9)
    related = frozenset({disk, partition})
    kata.devices.related[partition] = DeviceSet(frozenset({partition}), related)
    await kata.co.publish("vol-1", one)
    await refused(kata.co.publish("vol-2", two), Code.FAILED_PRECONDITION, "vol-2", one)
    assert kata.entry(two) is None
    assert two not in kata.driver.published


async def test_second_volume_at_a_target_leaves_the_first_alone(kata: Node, target: str) -> None:
    """A confused CO: the loser must not remove the winner's guard, directory or entry."""
    gate = kata.driver.gates["NodePublishVolume"] = Gate()
    winner = asyncio.create_task(kata.co.publish("vol-1", target))
    await until(gate.entered)
    await refused(kata.co.publish("vol-2", target), Code.ABORTED, target, "NodePublishVolume")
    gate.opened.set()
    await winner
    await refused(kata.co.publish("vol-2", target), Code.INVALID_ARGUMENT, "vol-1")
    kata.check_published("vol-1", target)


async def test_readers_may_share_but_no_writer_joins_them(kata: Node) -> None:
    one, two, three = (kata.places.target(name) for name in ("one", "two", "three"))
    await kata.co.publish("vol-1", one, readonly=True)
    await kata.co.publish("vol-1", two, readonly=True)
    await refused(
        kata.co.publish("vol-1", three), Code.FAILED_PRECONDITION, "only readers may share"
    )
    kata.check_published("vol-1", one)
    kata.check_published("vol-1", two)


@pytest.mark.spec("D-21")
async def test_a_host_mount_beside_a_deferred_one_never_reaches_the_driver(kata: Node) -> None:
    one, two = kata.places.target("one"), kata.places.target("two")
    await kata.co.publish("vol-1", one)
    calls = len(kata.driver.calls)
    for odd in (two, f"{two}/", f"{kata.places.kubelet}/../x"):
        await refused(
            kata.co.publish("vol-1", odd, defer=False),
            Code.FAILED_PRECONDITION,
            "mounted on the host",
            one,
        )
    assert len(kata.driver.calls) == calls


@pytest.mark.spec("D-17")
async def test_a_publish_never_switches_from_deferred_to_host(kata: Node, published: str) -> None:
    await refused(
        kata.co.publish("vol-1", published, defer=False),
        Code.ALREADY_EXISTS,
        published,
        "unpublish",
    )
    kata.check_published("vol-1", published)


async def test_host_and_deferred_publish_at_once_are_aborted(kata: Node) -> None:
    one, two = kata.places.target("one"), kata.places.target("two")
    gate = kata.driver.gates["NodePublishVolume"] = Gate()
    first = asyncio.create_task(kata.co.publish("vol-1", one))
    await until(gate.entered)
    await refused(kata.co.publish("vol-1", two, defer=False), Code.ABORTED, "vol-1", "retry")
    gate.opened.set()
    await first
    await kata.co.unpublish("vol-1", one)

    gate = kata.driver.gates["NodePublishVolume"] = Gate()
    host = asyncio.create_task(kata.co.publish("vol-1", two, defer=False))
    await until(gate.entered)
    await refused(kata.co.publish("vol-1", one), Code.ABORTED, "pass-through", "retry")
    gate.opened.set()
    await host
    assert kata.entry(one) is None


async def test_concurrent_host_publishes_of_one_volume_reach_the_driver(node: Node) -> None:
    one, two = node.places.target("one"), node.places.target("two")
    gate = node.driver.gates["NodePublishVolume"] = Gate()
    first = asyncio.create_task(node.co.publish("vol-1", one, defer=False))
    second = asyncio.create_task(node.co.publish("vol-1", two, defer=False))
    await until(gate.entered)
    gate.opened.set()
    await asyncio.gather(first, second)
    assert set(node.driver.published) == {one, two}


@pytest.mark.parametrize("refused_with", ["reader rw", "writer ro", "writer rw"])
def test_only_a_readers_publish_passes_beside_read_only_host_mounts(
    monkeypatch: pytest.MonkeyPatch, refused_with: str
) -> None:
    def check(publish: str, host_option: str) -> None:
        mount = mountinfo.Mount(
            mount_id=1, parent_id=0, major=7, minor=7, root="/", target="/mnt", options=(host_option,),
            fs_type="ext4", source="/dev/loop7", super_options=("rw",),
        )  # fmt: skip
        monkeypatch.setattr(mountinfo, "of_devices", lambda *_: [mount])
        source = volumes.BlockSource("/dev/loop7", volumes.DeviceIdentity(7, 7, 42))
        in_use.check(source, readonly=publish == "reader", probe=False)

    check("reader", "ro")
    with raised("DeviceMountedOnHost", match="mounted at /mnt"):
        check(*refused_with.split())
