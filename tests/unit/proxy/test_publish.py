"""Deferred publishes, end to end over real sockets: CO, proxy, shim, driver, handler."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from crust.core import volumes
from crust.proxy.target import Guard
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import capability, publish_request
from tests.support.drivers import fake_driver
from tests.support.drivers.fake_driver import Failure, Gate
from tests.support.faults.refusals import refused, until
from tests.support.nodes.fake_node import FakeNode
from tests.support.runtimes.fake_handler import ALL_FEATURES

Code = grpc.StatusCode


@pytest.mark.spec("D-8", "D-9", "D-15")
async def test_deferred_publish_leaves_entry_and_guard(kata: FakeNode, target: str) -> None:
    answer = await kata.co.publish("vol-1", target)
    assert answer.ByteSize() == 0
    kata.check_published("vol-1", target)
    await kata.co.unpublish("vol-1", target)
    kata.check_untouched(target)


@pytest.mark.spec("H-39")
async def test_guard_takes_names_only_for_a_handler_with_sub_path(
    node: FakeNode, target: str
) -> None:
    """Also one that an attempt for another handler has left, whose unpublish failed."""
    node.driver.failures["NodePublishVolume"] = Failure(Code.UNAVAILABLE, "restarting")
    async with node.handler():
        await refused(node.co.publish("vol-1", target), Code.UNAVAILABLE)
        assert node.targets.guard_at(volumes.TargetPath(target)) == Guard(0, names=True)
    node.driver.failures.clear()
    async with node.handler(features=ALL_FEATURES - {volumes.HandlerFeature.SUB_PATH}):
        await node.co.publish("vol-1", target)
        assert node.targets.guard_at(volumes.TargetPath(target)) == Guard(0, names=False)


async def test_record_holds_the_request_and_the_drivers_answer(kata: FakeNode, target: str) -> None:
    given = capability(
        "xfs",
        mount_flags=["noatime", "_netdev"],
        volume_supplemental_group="3000",
        volume_supplemental_group_change_policy="OnRootMismatch",
    )
    await kata.co.publish("vol-1", target, given)
    record = kata.record(target)
    assert record.device == fake_driver.device_of("vol-1")
    assert record.handler == "kata"
    assert (record.mount.fs_type, record.mount.mount_options) == ("xfs", ("noatime",))
    group = volumes.GroupChange(3000, volumes.GroupPolicy.ON_ROOT_MISMATCH)
    assert record.mount.group == group


@pytest.mark.spec("D-6")
async def test_group_that_the_co_delegates_reaches_the_runtime(kata: FakeNode, target: str) -> None:
    """A released CO sends only volume_mount_group."""
    await kata.co.publish("vol-1", target, capability(volume_mount_group="7"))
    group = volumes.GroupChange(7, volumes.GroupPolicy.ON_ROOT_MISMATCH)
    assert kata.record(target).mount.group == group


@pytest.mark.spec("D-5")
async def test_group_of_root_that_the_co_delegates_is_refused(kata: FakeNode, target: str) -> None:
    """A kubelet delegates `fsGroup: 0` to a driver with VOLUME_MOUNT_GROUP; no runtime has it."""
    publish = kata.co.publish("vol-1", target, capability(volume_mount_group="0"))
    await refused(publish, Code.INVALID_ARGUMENT, "'0'", "fsGroup")
    assert kata.driver.called("NodePublishVolume") == []
    kata.check_untouched(target)
    await kata.co.publish("vol-1", target, capability(volume_mount_group="0"), defer=False)


@pytest.mark.parametrize(
    "given", [capability(mode="MULTI_NODE_READER_ONLY"), capability(mount_flags=["ro"])]
)
async def test_publish_for_readers_alone_is_recorded_as_read_only(
    kata: FakeNode, target: str, given: csi_pb2.VolumeCapability
) -> None:
    kata.driver.alter = lambda answer: answer.ClearField("mount_options")
    await kata.co.publish("vol-1", target, given)
    assert kata.record(target).readonly


@pytest.mark.spec("D-24")
async def test_drivers_status_passes_with_its_details(kata: FakeNode, target: str) -> None:
    """Text and code pass though the text is long: RESOURCE_EXHAUSTED of a cut one would move the pod."""
    text = "mkfs: é" * 8000  # almost the 64 KiB that a peer may send
    trailing = (("grpc-status-details-bin", b"\x08\x08\x12\x03abc"), ("x-hint", "more"))
    kata.driver.failures["NodePublishVolume"] = Failure(Code.UNKNOWN, text, trailing)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await kata.co.publish("vol-1", target)
    assert (caught.value.code(), caught.value.details()) == (Code.UNKNOWN, text)
    assert set(trailing) <= set(caught.value.trailing_metadata())
    kata.check_untouched(target)
    assert kata.driver.called("NodeUnpublishVolume") == [], "nothing exists that could be undone"


@pytest.mark.spec("D-10")
async def test_driver_that_mounts_instead_is_undone_and_reported(
    kata: FakeNode, target: str
) -> None:
    kata.driver.mounts_instead = True
    await refused(
        kata.co.publish("vol-1", target), Code.INTERNAL, "vol-1", "without deferred_mount", "bug"
    )
    kata.check_untouched(target)


@pytest.mark.parametrize(
    ("alter", "words"),
    [
        (lambda answer: setattr(answer, "capacity_bytes", 0), "capacity_bytes"),
        (lambda answer: setattr(answer, "fs_type", "xfs"), "'ext4' was requested"),
        (
            lambda answer: setattr(answer, "supplemental_group", ""),
            "7 (OnRootMismatch) was requested",
        ),
    ],
)
@pytest.mark.spec("D-11", "D-12")
async def test_invalid_metadata_is_refused_and_unpublished(
    kata: FakeNode, target: str, alter: Callable[[csi_pb2.DeferredMount], None], words: str
) -> None:
    kata.driver.alter = alter
    given = capability(volume_supplemental_group="7")
    await refused(kata.co.publish("vol-1", target, given), Code.INTERNAL, words, "bug")
    kata.check_untouched(target)


@pytest.mark.spec("D-13")
async def test_credential_among_the_options_is_refused_by_name(kata: FakeNode, target: str) -> None:
    given = capability(mount_flags=["password=s3same"])
    words = ("password", "credential")
    text = await refused(kata.co.publish("vol-1", target, given), Code.INVALID_ARGUMENT, *words)
    assert "s3same" not in text
    assert kata.driver.called("NodePublishVolume") == []
    kata.check_untouched(target)


async def test_publish_outlives_its_caller_and_the_retry_joins_it(
    kata: FakeNode, target: str
) -> None:
    gate = kata.driver.gates["NodePublishVolume"] = Gate()
    first = asyncio.create_task(kata.co.publish("vol-1", target))
    await until(gate.entered)
    first.cancel()
    second = asyncio.create_task(kata.co.publish("vol-1", target))
    await refused(
        kata.co.publish("vol-1", target, readonly=True), Code.ABORTED, "NodePublishVolume", "retry"
    )
    gate.opened.set()
    await second
    assert not gate.cancelled.is_set()
    assert len(kata.driver.called("NodePublishVolume")) == 1
    kata.check_published("vol-1", target)


async def test_publish_without_space_for_the_entry_leaves_nothing(
    kata: FakeNode, target: str
) -> None:
    """A file has the name of the entry's directory: the publish fails and undoes its changes.

    The file may be removed, so the code is not final. A look may have seen the file before the publish does: then it
    may be anybody's entry, and if not, it cannot be made one. Both refusals name it.
    """
    digest = volumes.TargetPath(target).digest
    file = Path(kata.places.volumes, digest)
    file.write_text("mine")
    await refused(kata.co.publish("vol-1", target), Code.UNAVAILABLE, digest)
    assert not os.path.lexists(target)
    assert target not in kata.driver.published
    assert file.read_text() == "mine"


async def test_bytes_that_are_not_a_request_are_refused(node: FakeNode) -> None:
    raw: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = node.co.channel.unary_unary(
        "/csi.v1.Node/NodePublishVolume"
    )
    await refused(raw(b"\xff\xff\xff"), Code.INVALID_ARGUMENT, "csi.v1.NodePublishVolumeRequest")


async def test_unknown_fields_reach_the_driver_when_deferred(kata: FakeNode, target: str) -> None:
    unknown = b"\xaa\xf7\x07\x05later"  # field 15733, length-delimited
    data = publish_request("vol-1", target).SerializeToString() + unknown
    raw: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = kata.co.channel.unary_unary(
        "/csi.v1.Node/NodePublishVolume"
    )
    await raw(data, timeout=10)
    (call,) = kata.driver.called("NodePublishVolume")
    assert b"later" in call.request.SerializeToString()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "empty"),
        ("pods/one/mount", "relative"),
        ("{kubelet}/../etc/mount", "'..'"),
        ("{kubelet}/./mount", "'.'"),
        ("{kubelet}//mount", "empty component"),
        ("{kubelet}/mount/", "trailing slash"),
        ("{kubelet}/" + "n" * 256, "longer than 255 bytes"),
        ("{kubelet}/" + "name/" * 900 + "mount", "longer than 4095 bytes"),
        ("{kubelet}/a\0b", "control character"),
        ("{kubelet}/a\x1b[2J", "control character"),
        ("{kubelet}/a\nb", "control character"),
        ("{kubelet}/a\x9bb", "control character"),  # CSI of C1
    ],
)
async def test_invalid_target_path_is_refused(kata: FakeNode, path: str, words: str) -> None:
    target = path.replace("{kubelet}", kata.places.kubelet)
    await refused(
        kata.co.publish("vol-1", target),
        Code.INVALID_ARGUMENT,
        "target_path",
        words,
        "absolute, normalised path",
    )
    assert kata.driver.called("NodePublishVolume") == []
    assert kata.places.entries() == []


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("volume_id", "", "volume_id"),
        ("volume_id", "v" * 513, "volume_id"),
        ("volume_id", "vol\x01", "volume_id"),
        ("volume_capability", None, "access_type is missing"),
    ],
)
async def test_publish_with_an_invalid_field_is_refused(
    kata: FakeNode, target: str, field: Any, value: str | None, words: str
) -> None:
    request = publish_request("vol-1", target)
    request.ClearField(field)
    if value is not None:
        setattr(request, field, value)
    publish = kata.co.node.NodePublishVolume(request, timeout=10)
    await refused(publish, Code.INVALID_ARGUMENT, words)
    assert kata.driver.called("NodePublishVolume") == []
    kata.check_untouched(target)


@pytest.mark.spec("D-21")
async def test_second_target_of_volume_is_refused_naming_the_holder(kata: FakeNode) -> None:
    one, two = kata.places.target("one"), kata.places.target("two")
    await kata.co.publish("vol-1", one)
    await refused(
        kata.co.publish("vol-1", two), Code.FAILED_PRECONDITION, "vol-1", one, "for writing", "stop"
    )
    assert len(kata.driver.called("NodePublishVolume")) == 1
    kata.check_published("vol-1", one)
    assert kata.entry(two) is None
    assert not kata.targets.has_guard(volumes.TargetPath(two))


async def test_second_volume_at_a_target_leaves_the_first_alone(
    kata: FakeNode, target: str
) -> None:
    """A confused CO: the loser must not remove the winner's guard, directory, entry or reservation."""
    unpublishing = kata.driver.gates["NodeUnpublishVolume"] = Gate()
    unpublish = asyncio.create_task(kata.co.unpublish("vol-3", target))
    await until(unpublishing.entered)
    gate = kata.driver.gates["NodePublishVolume"] = Gate()
    winner = asyncio.create_task(kata.co.publish("vol-1", target))
    await until(gate.entered)
    await refused(kata.co.publish("vol-2", target), Code.ABORTED, target, "NodePublishVolume")
    gate.opened.set()
    await winner
    unpublishing.opened.set()
    await unpublish
    await refused(kata.co.unstage("vol-1", "/staging"), Code.FAILED_PRECONDITION, target)
    await refused(kata.co.publish("vol-2", target), Code.ALREADY_EXISTS, "vol-1")
    kata.check_published("vol-1", target)
