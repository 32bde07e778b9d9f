"""The filesystem that the proxy makes for a handler whose guests make none; the passphrase of an encrypted volume."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import pytest

from crust.core import errors, volumes
from crust.core.volumes import HandlerFeature
from crust.handoff import claims, layout
from crust.handoff.record import Record
from crust.handoff.store import Store
from crust.runtime_handler.registration import Registration
from crust.wire.v1 import inspect_pb2
from tests.support.co import NAMED
from tests.support.drivers import fake_driver
from tests.support.drivers.fake_driver import MIB, Gate
from tests.support.faults.refusals import refused, until
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places
from tests.support.records.records import a_record
from tests.support.runtimes.fake_handler import ALL_FEATURES, sandbox

Code = grpc.StatusCode
WANTED = volumes.GuestFormat(ext4_reserved_percent=1)
DEVICE = fake_driver.device_of("vol-1")
KEY = "csi.example.com/vol-1"


@pytest.fixture
async def empty(node: FakeNode) -> AsyncIterator[FakeNode]:
    """A node whose driver's volumes were created empty, and whose handler offers no FORMAT."""
    node.driver.format = WANTED
    async with node.handler(features=ALL_FEATURES - {HandlerFeature.FORMAT}):
        yield node


@pytest.mark.spec("D-38", "D-16")
async def test_blank_volume_is_formatted_once_and_recorded_so(empty: FakeNode, target: str) -> None:
    await empty.co.publish("vol-1", target)
    assert empty.filesystems.made == {DEVICE: ("ext4", WANTED)}
    assert empty.record(target).mount.format is None
    before = empty.entry(target)
    await empty.co.publish("vol-1", target)
    assert empty.entry(target) == before
    assert empty.filesystems.looks == 1


@pytest.mark.spec("D-38")
async def test_handler_with_format_gets_the_blank_volume(kata: FakeNode, target: str) -> None:
    kata.driver.format = WANTED
    await kata.co.publish("vol-1", target)
    assert kata.record(target).mount.format == WANTED
    assert kata.filesystems.looks == 0


async def test_volume_that_nobody_calls_empty_is_not_looked_at(
    empty: FakeNode, target: str
) -> None:
    empty.driver.format = None
    await empty.co.publish("vol-1", target)
    assert empty.filesystems.looks == 0


@pytest.mark.spec("D-38")
async def test_blank_volume_that_is_to_be_read_only_is_refused(
    empty: FakeNode, target: str
) -> None:
    await refused(
        empty.co.publish("vol-1", target, readonly=True),
        Code.FAILED_PRECONDITION,
        "ReadOnlyVolumeNotFormatted",
    )
    assert empty.filesystems.made == {}
    empty.check_untouched(target)


@pytest.mark.spec("D-26")
async def test_filesystem_smaller_than_its_device_is_refused_without_grow(
    node: FakeNode, target: str
) -> None:
    """Nobody would grow it; one that is only read stays as it is, and so does one that is published already."""
    node.devices.sizes_bytes[DEVICE] = 64 * MIB
    async with node.handler(features=ALL_FEATURES - {HandlerFeature.GROW}):
        await node.co.publish("vol-1", target)
        node.filesystems.sizes_bytes[DEVICE] = 32 * MIB
        await node.co.publish("vol-1", target)
        await node.co.unpublish("vol-1", target)
        refusal = node.co.publish("vol-1", target)
        await refused(refusal, Code.FAILED_PRECONDITION, "[FilesystemNotGrown]", "GROW")
        node.check_untouched(target)
        await node.co.publish("vol-1", target, readonly=True)
        await node.co.unpublish("vol-1", target)
    async with node.handler():
        await node.co.publish("vol-1", target)


async def test_device_is_reserved_while_its_filesystem_is_made(
    empty: FakeNode, target: str
) -> None:
    empty.filesystems.gate = Gate()
    first = asyncio.ensure_future(empty.co.publish("vol-1", target))
    await until(empty.filesystems.gate.entered)
    assert empty.entry(target) is None
    empty.driver.identities["vol-2"] = fake_driver.identity_of(DEVICE)
    other = empty.places.target("two")
    await refused(empty.co.publish("vol-2", other), Code.FAILED_PRECONDITION, "DeviceReserved")
    empty.driver.after["NodePublishVolume"] = lambda: empty.targets.host_mounts.update(
        {other: DEVICE}
    )
    on_host = empty.co.publish("vol-2", other, defer=False)
    await refused(on_host, Code.FAILED_PRECONDITION, "DeviceReserved")
    assert empty.filesystems.looks == 1
    empty.filesystems.gate.opened.set()
    await first
    empty.check_published("vol-1", target)


async def test_failed_mkfs_leaves_nothing(empty: FakeNode, target: str) -> None:
    empty.filesystems.error = errors.RuntimeFailed("mkfs.ext4 failed")
    with_lock = empty.co.publish("vol-1", target)
    await refused(with_lock, Code.UNAVAILABLE, "mkfs.ext4 failed")  # its lock is held
    empty.filesystems.left.pop().close()
    await empty.co.unpublish("vol-1", target)
    empty.check_untouched(target)


def _calls(node: FakeNode, target: str) -> dict[str, Callable[[], Coroutine[Any, Any, object]]]:
    """Every call that could give the device to somebody, or take it away."""
    return {
        "publish": lambda: node.co.publish("vol-1", target),
        "another": lambda: node.co.publish("vol-1", node.places.target("two")),
        "on the host": lambda: node.co.publish("vol-1", node.places.target("host"), defer=False),
        "unpublish": lambda: node.co.unpublish("vol-1", target),
        "unstage": lambda: node.co.unstage("vol-1", "/staging"),
    }


@pytest.mark.parametrize("call", ["publish", "another", "on the host", "unpublish", "unstage"])
@pytest.mark.parametrize("restarted", [False, True], ids=["", "restarted"])
async def test_volume_on_which_tool_runs_is_neither_given_nor_returned(
    places: Places, target: str, call: str, *, restarted: bool
) -> None:
    """mkfs does not end, and the proxy gives up or is started again: the lock alone says that it runs."""
    features = ALL_FEATURES - {HandlerFeature.FORMAT}
    async with FakeNode(places) as node, node.handler(features=features):
        node.driver.format = WANTED
        node.filesystems.error = errors.RuntimeFailed("mkfs.ext4 failed")
        await refused(node.co.publish("vol-1", target), Code.UNAVAILABLE)
        (lock,) = node.filesystems.left
        if not restarted:
            asked = [call.method for call in node.driver.calls]
            await refused(_calls(node, target)[call](), Code.UNAVAILABLE)
            assert [call.method for call in node.driver.calls] == asked
    if restarted:
        async with (
            FakeNode(places, driver=node.driver) as node,
            node.handler(features=features),
        ):
            published = node.driver.published.copy()
            await refused(_calls(node, target)[call](), Code.UNAVAILABLE, "VolumeInUseByTool")
            assert node.driver.published == published
    lock.close()
    async with FakeNode(places, driver=node.driver) as node, node.handler(features=features):
        await node.co.publish("vol-1", target)
        await node.co.unpublish("vol-1", target)
        node.check_untouched(target)


PASSPHRASE = "correct horse battery staple"
KNOWN = {"passphrase": PASSPHRASE}
LUKS = {**NAMED, "crust.dev/encryption": "luks"}


async def encrypted(node: FakeNode, name: str = "one") -> volumes.TargetPath:
    """The target of a volume that is published to a guest and encrypted."""
    node.driver.passphrase = PASSPHRASE
    target = node.places.target(name)
    await node.co.publish("vol-1", target, volume_context=LUKS)
    return volumes.TargetPath(target)


@pytest.mark.spec("D-39", "D-45")
async def test_handler_whose_sandbox_has_the_volume_gets_the_passphrase(node: FakeNode) -> None:
    async with node.handler() as session:
        target = await encrypted(node)
        assert node.record(target.text).mount.encryption is volumes.Encryption.LUKS
        with node.sandbox(target.text):
            assert await session.secrets_of(target) == KNOWN


@pytest.mark.spec("D-45")
async def test_secrets_without_a_sandbox_of_the_handler_are_refused(node: FakeNode) -> None:
    endpoint = f"{node.places.root}/other.sock"
    async with node.handler() as session, node.handler(name="other", endpoint=endpoint) as other:
        target = await encrypted(node)
        await _refused(session, target)
        with node.sandbox(target.text, handler="other"):
            await _refused(session, target)
        paths = layout.Layout(node.places.volumes).entry(target)
        with node.sandbox(target.text):
            await _refused(other, target)
            dead = Path(paths.claim).read_bytes()
        Path(paths.claim).write_bytes(dead)
        await _refused(session, target)
        with claims.ClaimLock.acquire(paths, target):  # as while the proxy itself unpublishes
            await _refused(session, target)


async def test_volume_that_needs_no_secret_has_none(node: FakeNode) -> None:
    async with node.handler() as session:
        target = node.places.target("one")
        await node.co.publish("vol-1", target)
        with node.sandbox(target):
            assert await session.secrets_of(volumes.TargetPath(target)) == {}


@pytest.mark.spec("D-46")
async def test_repeated_publish_renews_it(node: FakeNode) -> None:
    async with node.handler() as session:
        target = await encrypted(node)
        node.driver.passphrase = "rotated"
        await node.co.publish("vol-1", target.text, volume_context=LUKS)
        with node.sandbox(target.text):
            assert await session.secrets_of(target) == {"passphrase": "rotated"}


@pytest.mark.spec("D-46")
async def test_after_a_restart_it_is_forgotten_until_the_next_publish(places: Places) -> None:
    async with FakeNode(places) as first, first.handler():
        target = await encrypted(first)
    with sandbox(places.volumes, target.text):
        async with (
            FakeNode(places, driver=first.driver) as second,
            second.handler() as session,
        ):
            with pytest.raises(errors.NotReady, match="delete the pod") as caught:
                await session.secrets_of(target)
            assert caught.value.error_name == "SecretsForgotten"
            await second.co.publish("vol-1", target.text, volume_context=LUKS)
            assert await session.secrets_of(target) == KNOWN


@pytest.mark.spec("D-46")
async def test_unpublished_volume_has_no_secrets_any_more(node: FakeNode) -> None:
    async with node.handler() as session:
        target = await encrypted(node)
        await node.co.unpublish("vol-1", target.text)
        store = Store(node.places.volumes)
        record = store.create(a_record(target=target, encryption=volumes.Encryption.LUKS)).require()
        assert record.key.volume_id == "vol-1"
        await node.inspect.ListDeferredVolumes(inspect_pb2.ListDeferredVolumesRequest(), timeout=10)
        with node.sandbox(target.text), pytest.raises(errors.NotReady, match="not known any more"):
            await session.secrets_of(target)


async def test_failed_publish_leaves_those_of_the_one_before(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_store: Store, _record: Record) -> Record:
        raise errors.RuntimeFailed("cannot sync")

    async with node.handler() as session:
        target = await encrypted(node)
        node.driver.passphrase = "of another"
        monkeypatch.setattr(Store, "write", fail)
        await refused(
            node.co.publish("vol-1", target.text, volume_context=LUKS), Code.UNAVAILABLE, "sync"
        )
        with node.sandbox(target.text):
            assert await session.secrets_of(target) == KNOWN


@pytest.mark.spec("D-47")
async def test_driver_that_ignores_the_encryption_is_refused(kata: FakeNode, target: str) -> None:
    publish = kata.co.publish("vol-1", target, volume_context=LUKS)
    await refused(publish, Code.INTERNAL, "DriverIgnoredEncryption", "unencrypted")
    kata.check_untouched(target)


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


async def test_passphrase_is_in_no_log_line_and_no_file(
    node: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with node.handler() as session:
        target = await encrypted(node)
        await _refused(session, target)
        with node.sandbox(target.text):
            assert await session.secrets_of(target) == KNOWN
        await node.co.publish("vol-1", target.text, volume_context=LUKS, secrets=KNOWN)
        await node.co.unpublish("vol-1", target.text)
    lines = [f"{record.getMessage()} {record.__dict__}" for record in caplog.records]
    assert any("GetVolumeSecrets" in line for line in lines)
    assert not any(PASSPHRASE in line for line in lines)
    files = [path for path in Path(node.places.root).rglob("*") if path.is_file()]
    assert not any(PASSPHRASE.encode() in path.read_bytes() for path in files)


async def _refused(session: Registration, target: volumes.TargetPath) -> None:
    with pytest.raises(errors.NotReady, match="no live sandbox") as caught:
        await session.secrets_of(target)
    assert caught.value.error_name == "SecretsNotForCaller"
