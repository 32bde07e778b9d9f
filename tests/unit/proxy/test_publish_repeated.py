"""A publish again at a target that has one: a repeat changes nothing, and another one is refused."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from crust.core import deferral_keys, volumes
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import capability
from tests.support.drivers import fake_driver
from tests.support.drivers.fake_driver import Failure
from tests.support.faults.refusals import refused
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places

Code = grpc.StatusCode


@pytest.mark.spec("D-16")
async def test_same_publish_again_is_ok_and_changes_nothing(kata: FakeNode, published: str) -> None:
    before = kata.entry(published)
    await kata.co.publish("vol-1", published)
    assert kata.entry(published) == before


async def test_retry_keeps_its_handler_beside_a_second_one(kata: FakeNode, published: str) -> None:
    async with kata.handler(name="other", endpoint=f"{kata.places.root}/other.sock"):
        await kata.co.publish("vol-1", published)
    assert kata.record(published).handler == "kata"


@pytest.mark.spec("D-17")
async def test_other_publish_of_the_target_is_already_exists(
    kata: FakeNode, published: str
) -> None:
    before = kata.entry(published)
    publish = kata.co.publish("vol-1", published, capability(mount_flags=["noatime"]))
    words = ("published already", "kata", "unpublish it first")
    await refused(publish, Code.ALREADY_EXISTS, *words)
    assert kata.entry(published) == before
    kata.check_published("vol-1", published)


@pytest.mark.spec("D-17")
async def test_publish_again_to_another_handler_is_already_exists(
    kata: FakeNode, published: str
) -> None:
    """The volume stays with the handler that may have it: an OK would say that the other one has it."""
    other = {"crust.dev/runtime-handler": "other"}
    async with kata.handler(name="other", endpoint=f"{kata.places.root}/other.sock"):
        publish = kata.co.publish("vol-1", published, volume_context=other)
        await refused(publish, Code.ALREADY_EXISTS, "published already", "kata")
    assert kata.record(published).handler == "kata"


@pytest.mark.spec("D-16")
async def test_publish_again_is_ok_where_driver_made_it_read_only(
    kata: FakeNode, target: str
) -> None:
    def read_only(answer: csi_pb2.DeferredMount) -> None:
        answer.readonly = True

    kata.driver.alter = read_only
    await kata.co.publish("vol-1", target)
    await kata.co.publish("vol-1", target)
    assert kata.record(target).readonly


async def test_device_attached_again_replaces_the_record(kata: FakeNode, published: str) -> None:
    kata.driver.identities["vol-1"] = (7, 99, 4711)
    await kata.co.publish("vol-1", published)
    record = kata.record(published)
    assert record.identity == volumes.DeviceIdentity(7, 99, 4711)
    assert record.crust.generation == 2


async def test_device_that_changed_under_a_sandbox_is_refused(
    kata: FakeNode, published: str
) -> None:
    kata.driver.identities["vol-1"] = (7, 99, 4711)
    with kata.sandbox(published, name="box-7"):
        await refused(kata.co.publish("vol-1", published), Code.UNAVAILABLE, "box-7", "stop")
    kata.check_published("vol-1", published)


@pytest.mark.spec("D-16")
async def test_retry_of_a_standing_publish_needs_no_handler(places: Places, target: str) -> None:
    """The answer was lost, the proxy was started again, and the handler is not back in time."""
    driver = fake_driver.FakeDriver()
    async with FakeNode(places, driver=driver) as node, node.handler():
        await node.co.publish("vol-1", target)
    async with FakeNode(places, driver=driver) as node:
        await node.co.publish("vol-1", target)
        node.check_published("vol-1", target)
        assert node.record(target).handler == "kata"


@pytest.mark.spec("D-36")
@pytest.mark.parametrize("readonly", [False, True])
async def test_drivers_already_exists_is_final_only_for_other_arguments(
    kata: FakeNode, published: str, *, readonly: bool
) -> None:
    """A driver that was exchanged may call anything so; a kubelet sends the same arguments."""
    kata.driver.failures["NodePublishVolume"] = Failure(Code.ALREADY_EXISTS, "differs")
    code = Code.ALREADY_EXISTS if readonly else Code.UNAVAILABLE
    words = "published already" if readonly else "differs"
    await refused(kata.co.publish("vol-1", published, readonly=readonly), code, words)
    assert len(kata.driver.called("NodePublishVolume")) == (1 if readonly else 2)
    kata.check_published("vol-1", published)


TOKENS = "csi.storage.k8s.io/serviceAccount.tokens"


@pytest.mark.spec("D-16", "D-36")
async def test_repeat_is_ok_though_the_driver_answers_otherwise(
    kata: FakeNode, target: str
) -> None:
    """The driver was upgraded, and has other defaults; the CO may never have got the first answer."""
    first = {TOKENS: "first", "vendor": "1"}
    await kata.co.publish("vol-1", target, volume_context=first, publish_context={"path": "/dev/a"})

    def answer_otherwise(answer: csi_pb2.DeferredMount) -> None:
        answer.mount_options.append("discard")
        answer.supplemental_group = "77"
        answer.readonly = True

    kata.driver.alter = answer_otherwise
    again = {TOKENS: "second", "vendor": "1"}
    with kata.sandbox(target):
        before = kata.entry(target)
        await kata.co.publish("vol-1", target, volume_context=again)
        assert kata.entry(target) == before, "a sandbox mounts it as it was"
    await kata.co.publish("vol-1", target, volume_context=again, staging="/moved")
    record = kata.record(target)
    assert record.mount.mount_options == ("discard",)
    assert record.mount.group == volumes.GroupChange(77, volumes.GroupPolicy.ON_ROOT_MISMATCH)
    assert record.readonly
    kata.check_published("vol-1", target)


@pytest.mark.spec("D-21")
async def test_device_of_a_writer_stays_reserved_while_it_is_repeated(
    kata: FakeNode, target: str
) -> None:
    """The driver answers read-only to the repeat, and the sandbox writes by the answer of before."""
    await kata.co.publish("vol-1", target)
    kata.driver.identities["vol-2"] = fake_driver.identity_of(fake_driver.device_of("vol-1"))
    kata.driver.alter = lambda answer: setattr(answer, "readonly", True)
    entered, opened = threading.Event(), threading.Event()
    check_mounts = kata.targets.check_mounts

    def wait(*arguments: Any, **options: Any) -> None:
        entered.set()
        assert opened.wait(60)
        check_mounts(*arguments, **options)

    kata.targets.check_mounts = wait
    two = kata.places.target("two")
    with kata.sandbox(target):
        repeat = asyncio.create_task(kata.co.publish("vol-1", target))
        assert await asyncio.to_thread(entered.wait, 60)
        reader = kata.co.publish("vol-2", two, readonly=True)
        await refused(reader, Code.FAILED_PRECONDITION, "for writing", target)
        opened.set()
        await repeat
        reader = kata.co.publish("vol-2", two, readonly=True)
        await refused(reader, Code.FAILED_PRECONDITION, "for writing", target)


@pytest.mark.spec("D-17")
@pytest.mark.parametrize(
    ("given", "fields"),
    [
        (capability("xfs"), {}),
        (capability(mount_flags=["noatime"]), {}),
        (capability(volume_mount_group="7"), {}),
        (capability(mode="SINGLE_NODE_SINGLE_WRITER"), {}),
        (capability(), {"readonly": True}),
        (capability(), {"defer": False}),
        (capability(), {"volume_context": {deferral_keys.RUNTIME_HANDLER: "other"}}),
        (capability(), {"volume_context": {"vendor": "2"}}),
    ],
)
async def test_each_other_argument_is_already_exists_without_a_call(
    kata: FakeNode, published: str, given: csi_pb2.VolumeCapability, fields: dict[str, Any]
) -> None:
    calls = len(kata.driver.calls)
    publish = kata.co.publish("vol-1", published, given, **fields)
    await refused(publish, Code.ALREADY_EXISTS, "unpublish it first")
    assert len(kata.driver.calls) == calls
    kata.check_published("vol-1", published)


async def test_entry_that_names_no_request_is_not_known_to_differ(
    kata: FakeNode, published: str
) -> None:
    """An earlier version of the proxy wrote it. The CO unpublishes it as before."""
    entry = kata.entry(published)
    assert entry is not None
    path = Path(entry.directory, "mountInfo.json")
    plain = json.loads(path.read_text())
    del plain["crust"]["request"]
    path.write_text(json.dumps(plain))
    for defer in (True, False):
        await refused(
            kata.co.publish("vol-1", published, defer=defer), Code.UNAVAILABLE, "unpublish it first"
        )
    await kata.co.unpublish("vol-1", published)
    kata.check_untouched(published)


@pytest.mark.spec("D-36")
async def test_request_that_is_decided_otherwise_now_is_not_final(
    places: Places, target: str
) -> None:
    """The driver's default in the settings was changed, and the proxy started again."""
    driver = fake_driver.FakeDriver()
    async with FakeNode(places, driver=driver, defer="always") as node, node.handler():
        await node.co.publish("vol-1", target, defer=False)
        assert node.entry(target) is not None
    async with FakeNode(places, driver=driver, defer="never") as node, node.handler():
        await refused(
            node.co.publish("vol-1", target, defer=False), Code.UNAVAILABLE, "to a runtime"
        )
        node.check_published("vol-1", target)


async def test_downgraded_driver_ends_no_standing_publish(places: Places, target: str) -> None:
    driver = fake_driver.FakeDriver()
    async with FakeNode(places, driver=driver) as node, node.handler():
        await node.co.publish("vol-1", target)
    driver.defers = False
    async with FakeNode(places, driver=driver) as node, node.handler():
        await refused(node.co.publish("vol-1", target), Code.UNAVAILABLE, "DEFER_FS_OPS")
        node.check_published("vol-1", target)


async def test_refused_other_device_of_a_repeat_is_not_reserved(
    kata: FakeNode, target: str
) -> None:
    """The entry has the device of before, and reserves that one alone."""
    await kata.co.publish("vol-1", target)
    kata.driver.identities["vol-1"] = fake_driver.identity_of(fake_driver.device_of("vol-3"))
    kata.targets.written.add(fake_driver.device_of("vol-1"))
    await refused(kata.co.publish("vol-1", target), Code.UNAVAILABLE, "DeviceInUse")
    kata.targets.written.clear()
    await kata.co.publish("vol-3", kata.places.target("three"))
    del kata.driver.identities["vol-1"]
    kata.driver.identities["vol-2"] = fake_driver.identity_of(fake_driver.device_of("vol-1"))
    other = kata.co.publish("vol-2", kata.places.target("two"))
    await refused(other, Code.FAILED_PRECONDITION, "DeviceReserved", target)
