"""The secrets of a volume: for the handler whose sandbox has it, and for nobody else."""

import logging
from pathlib import Path

import grpc
import pytest

from crust.core import errors, volumes
from crust.handoff import claims, layout
from crust.handoff.record import Record
from crust.handoff.store import Store
from crust.runtime_handler.registration import Registration
from crust.wire.v1 import inspect_pb2
from tests.support.co import NAMED
from tests.support.faults.refusals import refused
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places
from tests.support.records.records import a_record
from tests.support.runtimes.fake_handler import sandbox

Code = grpc.StatusCode
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
