"""Publishes on the host beside deferred ones: two writers of one device, in either order, are refused."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from crust.core import deferral_keys, errors, volumes
from crust.host.block.device_sets import DeviceSet
from crust.host.process.syscalls import ProcessOutOfResources
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import NAMED, capability, publish_request
from tests.support.drivers import fake_driver
from tests.support.drivers.fake_driver import Failure, FakeDriver, Gate, device_of
from tests.support.faults.refusals import refused, until
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.fake_targets import FakeDevices
from tests.support.nodes.places import Places

Code = grpc.StatusCode


def raw_request(
    node: FakeNode, name: str, volume_id: str, **fields: Any
) -> csi_pb2.NodePublishVolumeRequest:
    """A raw publish at a target where the driver makes the device's node."""
    target = node.places.target(name)
    node.devices.nodes[target] = device_of(volume_id)
    request = publish_request(volume_id, target, defer=False, **fields)
    request.volume_capability.block.SetInParent()
    return request


async def publish_raw(node: FakeNode, name: str, volume_id: str, **fields: Any) -> str:
    request = raw_request(node, name, volume_id, **fields)
    await node.co.node.NodePublishVolume(request, timeout=60)
    return request.target_path


def share(node: FakeNode, one: str, other: str) -> None:
    """Two volumes with one device, by two paths."""
    mine, theirs = (node.devices.identify(device_of(volume_id)) for volume_id in (one, other))
    both = DeviceSet(frozenset({mine, theirs}), frozenset({mine, theirs}))
    node.devices.related.update({mine: both, theirs: both})


async def test_holder_of_a_device_is_named_by_its_pod(kata: FakeNode) -> None:
    pod = {"csi.storage.k8s.io/pod.name": "db-0", "csi.storage.k8s.io/pod.namespace": "shop"}
    one = kata.places.target("one")
    await kata.co.publish("vol-1", one, volume_context={**NAMED, **pod})
    share(kata, "vol-1", "vol-2")
    refusal = publish_raw(kata, "raw", "vol-2")
    await refused(refusal, Code.FAILED_PRECONDITION, "DeviceReserved", "stop the pod shop/db-0:")


async def test_raw_publish_of_device_with_runtime_is_undone(kata: FakeNode) -> None:
    await kata.co.publish("vol-1", kata.places.target("one"))
    share(kata, "vol-1", "vol-2")
    request = raw_request(kata, "raw", "vol-2")
    for number in (1, 2):  # the first one leaves no row, so the second one is new
        call = kata.co.node.NodePublishVolume(request, timeout=60, metadata=(("x-co", "1"),))
        words = ("DeviceReserved", "mounted on the host", kata.places.target("one"))
        await refused(call, Code.FAILED_PRECONDITION, *words)
        undo = kata.driver.called("NodeUnpublishVolume")[-1]
        assert len(kata.driver.called("NodeUnpublishVolume")) == number
        assert (undo.request.target_path, undo.request.defer_fs_ops) == (request.target_path, False)
        assert ("crust-extensions", "deferral") not in undo.metadata
        assert ("x-co", "1") in undo.metadata
        assert undo.time_left_s is not None
    kata.check_published("vol-1", kata.places.target("one"))


async def test_raw_publish_passes_whatever_is_said_of_its_filesystem(kata: FakeNode) -> None:
    context = {deferral_keys.FORMAT_IN: "guest", deferral_keys.DEFER: "always"}
    await publish_raw(kata, "raw", "vol-1", volume_context=context)


async def test_raw_publish_that_cannot_be_undone_is_not_final(kata: FakeNode) -> None:
    await kata.co.publish("vol-1", kata.places.target("one"))
    share(kata, "vol-1", "vol-2")
    kata.driver.failures["NodeUnpublishVolume"] = Failure(Code.INTERNAL, "stuck")
    call = kata.co.node.NodePublishVolume(raw_request(kata, "raw", "vol-2"), timeout=60)
    await refused(call, Code.UNAVAILABLE, "DeviceReserved")
    await kata.co.publish("vol-1", kata.places.target("one"))


@pytest.mark.parametrize("is_raw", [False, True])
async def test_host_publish_that_ends_after_a_deferred_one_is_undone(
    kata: FakeNode, *, is_raw: bool
) -> None:
    """Neither sees the device of the other before it has reserved its own."""
    share(kata, "vol-1", "vol-2")
    request, one = raw_request(kata, "host", "vol-2"), kata.places.target("one")
    devices = kata.devices.nodes if is_raw else kata.targets.host_mounts
    del kata.devices.nodes[request.target_path]
    if not is_raw:
        request.volume_capability.mount.SetInParent()
    gate = kata.driver.gates["NodePublishVolume"] = Gate()
    publish = asyncio.ensure_future(kata.co.node.NodePublishVolume(request, timeout=60))
    await until(gate.entered)
    del kata.driver.gates["NodePublishVolume"]
    await kata.co.publish("vol-1", one)
    devices[request.target_path] = device_of("vol-2")
    gate.opened.set()
    await refused(publish, Code.FAILED_PRECONDITION, "DeviceReserved", one)
    assert request.target_path not in kata.driver.published


async def test_repeated_raw_publish_that_is_refused_is_not_undone(kata: FakeNode) -> None:
    """A pod may be using it since the first one."""
    await publish_raw(kata, "raw", "vol-2")
    await kata.co.publish("vol-1", kata.places.target("one"))
    share(kata, "vol-1", "vol-2")
    await refused(publish_raw(kata, "raw", "vol-2"), Code.UNAVAILABLE, "DeviceReserved")
    assert not kata.driver.called("NodeUnpublishVolume")


async def test_deferred_publish_of_device_published_raw_is_undone(kata: FakeNode) -> None:
    target = kata.places.target("one")
    share(kata, "vol-1", "vol-2")
    gate = kata.driver.gates["NodePublishVolume"] = Gate()
    publishing = asyncio.create_task(publish_raw(kata, "raw", "vol-2"))
    await until(gate.entered)
    del kata.driver.gates["NodePublishVolume"]
    await refused(kata.co.publish("vol-1", target), Code.FAILED_PRECONDITION, "DeviceInUse")
    gate.opened.set()
    raw = await publishing
    await refused(publish_raw(kata, "raw", "vol-2", readonly=True), Code.ALREADY_EXISTS)
    await kata.co.publish("vol-3", kata.places.target("three"))
    kata.driver.failures["NodeUnpublishVolume"] = Failure(Code.UNAVAILABLE, "restarting")
    await refused(kata.co.unpublish("vol-2", raw), Code.UNAVAILABLE, "restarting")
    for readonly in (False, True):
        publish = kata.co.publish("vol-1", target, readonly=readonly)
        await refused(publish, Code.FAILED_PRECONDITION, "DeviceInUse", raw)
    assert target not in kata.driver.published
    assert kata.entry(target) is None
    await kata.co.unpublish("vol-2", raw)
    assert not kata.driver.called("NodeUnpublishVolume")[-1].request.defer_fs_ops
    await kata.co.publish("vol-1", target)


async def test_raw_publish_that_is_refused_leaves_nothing_behind(
    kata: FakeNode, target: str
) -> None:
    """A kubelet never unpublishes what got a final code, so nothing may be remembered of it."""
    kata.driver.failures["NodePublishVolume"] = Failure(Code.ALREADY_EXISTS, "staged for a mount")
    await refused(publish_raw(kata, "raw", "vol-2", readonly=True), Code.ALREADY_EXISTS, "staged")
    share(kata, "vol-1", "vol-2")
    await kata.co.publish("vol-1", target)
    await refused(publish_raw(kata, "raw", "vol-2"), Code.FAILED_PRECONDITION, "DeviceReserved")
    assert kata.driver.called("NodeUnpublishVolume"), "it was a new one, and was undone"
    await kata.co.unpublish("vol-1", target)
    raw = await publish_raw(kata, "raw", "vol-2")
    reader = kata.co.publish("vol-1", target, readonly=True)
    await refused(reader, Code.FAILED_PRECONDITION, "DeviceInUse", raw)


async def test_readers_share_a_device_raw_and_deferred(kata: FakeNode) -> None:
    await publish_raw(kata, "raw", "vol-2", readonly=True)
    share(kata, "vol-1", "vol-2")
    one = kata.places.target("one")
    await refused(kata.co.publish("vol-1", one), Code.FAILED_PRECONDITION, "DeviceInUse")
    await kata.co.publish("vol-1", one, readonly=True)
    await publish_raw(kata, "raw-2", "vol-2", readonly=True)
    await refused(
        kata.co.node.NodePublishVolume(raw_request(kata, "raw-3", "vol-2"), timeout=60),
        Code.FAILED_PRECONDITION,
        "only readers may share",
    )


def answer_device_of(node: FakeNode, volume_id: str, other: str) -> None:
    """The driver answers the device of another volume for this one: it was attached again, or paths were mixed up."""
    device = node.devices.identify(device_of(other))
    identity = (device.major, device.minor, device.disk_sequence)
    node.driver.identities[volume_id] = identity
    node.devices.identities = {**node.devices.identities, volume_id: identity}


@pytest.mark.spec("D-21")
async def test_other_device_of_a_repeated_publish_is_checked_as_new(
    kata: FakeNode, target: str
) -> None:
    await kata.co.publish("vol-1", target)
    raw, before = await publish_raw(kata, "raw", "vol-2"), kata.record(target).identity
    answer_device_of(kata, "vol-1", "vol-2")
    await refused(kata.co.publish("vol-1", target), Code.UNAVAILABLE, "DeviceInUse", raw)
    assert kata.record(target).identity == before
    await kata.co.unpublish("vol-2", raw)
    await kata.co.publish("vol-1", target)
    assert kata.record(target).identity != before


async def test_device_that_a_guest_writes_stays_in_its_entry(kata: FakeNode, target: str) -> None:
    """A virtual machine without its claim has the device of the entry."""
    await kata.co.publish("vol-1", target)
    kata.targets.written.add(device_of("vol-1"))
    await kata.co.publish("vol-1", target)  # the same device again
    answer_device_of(kata, "vol-1", "vol-2")
    await refused(kata.co.publish("vol-1", target), Code.UNAVAILABLE, "DeviceInUse", "qemu")
    kata.targets.written.clear()
    await kata.co.publish("vol-1", target)


async def test_raw_target_without_a_device_refuses_nothing(kata: FakeNode) -> None:
    raw, target = await publish_raw(kata, "raw", "vol-1"), kata.places.target("one")
    del kata.devices.nodes[raw]
    await kata.co.publish("vol-1", target)
    await kata.co.unpublish("vol-1", target)
    await kata.co.unstage("vol-1", "/staging")
    Path(raw).touch()  # where a device was bound before a crash
    await kata.co.publish("vol-1", target)


class FullProcess(FakeDevices):
    """No descriptor is left to look at a raw target."""

    def identify(self, path: str, /) -> volumes.DeviceIdentity:
        if "raw" in path:
            raise ProcessOutOfResources("cannot look", why="EMFILE")
        return super().identify(path)


async def test_raw_target_that_cannot_be_seen_is_not_free(places: Places) -> None:
    async with FakeNode(places, devices=FullProcess()) as node, node.handler():
        node.targets.host_mounts[places.target("host")] = "/dev/raw"
        await node.co.publish("vol-3", places.target("host"), defer=False)  # beside no reservation
        await node.co.publish("vol-2", places.target("one"))
        request = raw_request(node, "raw", "vol-1")
        await refused(
            node.co.node.NodePublishVolume(request, timeout=60), Code.UNAVAILABLE, "EMFILE"
        )
        assert not node.driver.called("NodeUnpublishVolume"), "a pod may be using it"
        target = places.target("two")
        await refused(node.co.publish("vol-4", target), Code.UNAVAILABLE, "EMFILE")
        assert node.entry(target) is None


class LateNode(FakeDevices):
    """The first look at a raw target finds nothing, and lasts until the test has used the time."""

    def __init__(self) -> None:
        super().__init__()
        self.looks, self.goes_on = threading.Event(), threading.Event()

    def identify(self, path: str, /) -> volumes.DeviceIdentity:
        if path in self.published and not self.looks.is_set():
            self.looks.set()
            assert self.goes_on.wait(60)
            raise errors.NotFound(f"there is no {path}")
        return super().identify(path)


async def test_raw_publish_that_ends_during_the_look_is_undone(places: Places) -> None:
    """The deferred publish has reserved the device before it looks."""
    devices = LateNode()
    async with FakeNode(places, devices=devices) as node, node.handler():
        share(node, "vol-1", "vol-2")
        gate = node.driver.gates["NodePublishVolume"] = Gate()
        raw = asyncio.create_task(publish_raw(node, "raw", "vol-2"))
        await until(gate.entered)
        del node.driver.gates["NodePublishVolume"]
        deferred = asyncio.create_task(node.co.publish("vol-1", places.target("one")))
        try:
            assert await asyncio.to_thread(devices.looks.wait, 60)
            gate.opened.set()
            await refused(raw, Code.FAILED_PRECONDITION, "DeviceReserved", places.target("one"))
        finally:
            devices.goes_on.set()
        await deferred


async def test_raw_publish_of_an_earlier_process_is_known(places: Places) -> None:
    driver, devices = FakeDriver(), FakeDevices()
    async with FakeNode(places, driver=driver, devices=devices) as node:
        share(node, "vol-1", "vol-2")
        raw = await publish_raw(node, "raw", "vol-2")
    async with FakeNode(places, driver=driver, devices=devices) as node, node.handler():
        publish = node.co.publish("vol-1", places.target("one"), readonly=True)
        await refused(publish, Code.FAILED_PRECONDITION, "DeviceInUse", raw)


async def test_host_publish_beside_a_deferred_reader_passes_for_a_reader(kata: FakeNode) -> None:
    one, two, three = (kata.places.target(name) for name in ("one", "two", "three"))
    await kata.co.publish("vol-1", one, readonly=True)
    await kata.co.publish("vol-1", two, defer=False, readonly=True)
    readers = capability(mode="MULTI_NODE_READER_ONLY")
    await kata.co.publish("vol-1", three, readers, defer=False)
    assert {two, three} < kata.driver.published.keys()


@pytest.mark.spec("D-21")
@pytest.mark.parametrize(
    ("deferred_readonly", "host_readonly"), [(False, False), (True, False), (False, True)]
)
async def test_host_mount_beside_a_deferred_one_never_reaches_the_driver(
    kata: FakeNode, *, deferred_readonly: bool, host_readonly: bool
) -> None:
    one, two = kata.places.target("one"), kata.places.target("two")
    await kata.co.publish("vol-1", one, readonly=deferred_readonly)
    calls = len(kata.driver.calls)
    for target in (two, f"{two}/", f"{kata.places.kubelet}/../x"):
        publish = kata.co.publish("vol-1", target, defer=False, readonly=host_readonly)
        await refused(publish, Code.FAILED_PRECONDITION, "mounted on the host", one)
    assert len(kata.driver.calls) == calls


@pytest.mark.spec("D-17")
async def test_publish_never_switches_from_deferred_to_host(kata: FakeNode, published: str) -> None:
    publish = kata.co.publish("vol-1", published, defer=False)
    await refused(publish, Code.ALREADY_EXISTS, published, "unpublish")
    kata.check_published("vol-1", published)


async def test_host_and_deferred_publish_at_once_are_aborted(kata: FakeNode) -> None:
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
    await refused(kata.co.publish("vol-2", two), Code.ABORTED, two, "NodePublishVolume")
    gate.opened.set()
    await host
    assert kata.entry(one) is None


async def test_concurrent_host_publishes_of_one_volume_reach_the_driver(node: FakeNode) -> None:
    one, two = node.places.target("one"), node.places.target("two")
    gate = node.driver.gates["NodePublishVolume"] = Gate()
    first = asyncio.create_task(node.co.publish("vol-1", one, defer=False))
    second = asyncio.create_task(node.co.publish("vol-1", two, defer=False))
    await until(gate.entered)
    gate.opened.set()
    await asyncio.gather(first, second)
    assert set(node.driver.published) == {one, two}


@pytest.mark.parametrize("is_retry", [False, True])
async def test_host_mount_by_another_volume_id_is_refused(
    kata: FakeNode, *, is_retry: bool
) -> None:
    """Two PersistentVolumes of one disk. What stood before the call is not undone by it."""
    deferred, host = kata.places.target("deferred"), kata.places.target("host")
    device = fake_driver.device_of("vol-1")
    await kata.co.publish("vol-1", deferred)
    if is_retry:
        kata.targets.host_mounts[host] = device
    kata.driver.after["NodePublishVolume"] = lambda: kata.targets.host_mounts.update({host: device})
    code = Code.UNAVAILABLE if is_retry else Code.FAILED_PRECONDITION
    await refused(kata.co.publish("vol-2", host, defer=False), code, "DeviceReserved")
    assert (host in kata.driver.published) == is_retry
    kata.check_published("vol-1", deferred)


@pytest.mark.spec("D-47")
@pytest.mark.parametrize(
    ("key", "name"),
    [("crust.dev/encryption", "EncryptedOnHost"), ("crust.dev/format-in", "FilesystemOfGuest")],
)
async def test_mount_on_the_host_is_refused_by_name(
    kata: FakeNode, target: str, key: str, name: str
) -> None:
    publish = kata.co.publish("vol-1", target, defer=False, volume_context={key: "x"})
    await refused(publish, Code.FAILED_PRECONDITION, name, key)
    assert not kata.driver.published
