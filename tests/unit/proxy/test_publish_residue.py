"""A failed publish gets a code that fits what exists: a kubelet forgets what got a final code."""

import asyncio
from typing import Any

import grpc
import pytest

from crust.core import deferral_keys, errors
from crust.handoff.record import Record
from crust.handoff.store import Store
from crust.proxy.policy import Policy
from crust.proxy.publish import Publish
from crust.rpc import csi_driver
from tests.support.co import NAMED
from tests.support.drivers import fake_driver
from tests.support.drivers.fake_driver import Failure, Gate
from tests.support.faults.refusals import refused, repeated, until
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places

Code = grpc.StatusCode


def _fail(*_: object, **__: object) -> None:
    raise ValueError("a bug")


def _other_filesystem(kata: FakeNode) -> None:
    """Make the driver's answer unusable: refused after the driver has published."""
    kata.driver.alter = lambda mount: setattr(mount, "fs_type", "btrfs")


@pytest.mark.spec("D-10")
@pytest.mark.parametrize(
    "kind", ["an answer that is refused", "a guard of before, and a driver that fails"]
)
async def test_undo_deletes_no_inline_volume(kata: FakeNode, target: str, kind: str) -> None:
    """Its unpublish is its delete, and after a reboot its publish is a new one."""
    inline = {**NAMED, deferral_keys.INLINE: "true"}
    if kind == "an answer that is refused":
        _other_filesystem(kata)
    else:
        kata.driver.failures["NodePublishVolume"] = Failure(Code.UNAVAILABLE, "no pool yet")
        await refused(
            kata.co.publish("vol-1", target, volume_context=inline), Code.UNAVAILABLE, "no pool yet"
        )
        kata.driver.failing["NodePublishVolume"] = Failure(Code.DATA_LOSS, "needs repair")
    for _ in range(2):
        await refused(kata.co.publish("vol-1", target, volume_context=inline), Code.UNAVAILABLE)
    assert kata.driver.called("NodeUnpublishVolume") == []
    kata.driver.failing.clear()
    kata.driver.alter = lambda _: None
    await kata.co.publish("vol-1", target, volume_context=inline)
    kata.check_published("vol-1", target)
    await kata.co.unpublish("vol-1", target)
    kata.check_untouched(target)


async def test_undo_at_the_driver_has_its_own_deadline(kata: FakeNode, target: str) -> None:
    """The CO's time is spent by a publish that took long, and the driver's publish must go all the same."""
    _other_filesystem(kata)
    await refused(kata.co.publish("vol-1", target, timeout_s=5), Code.INTERNAL, "'btrfs'")
    (undo,) = kata.driver.called("NodeUnpublishVolume")
    assert undo.time_left_s is not None
    assert undo.time_left_s > csi_driver.CHANGE_TIMEOUT_S / 2
    kata.check_untouched(target)


async def test_undo_at_driver_goes_on_after_co_gave_up(kata: FakeNode, target: str) -> None:
    _other_filesystem(kata)
    gate = kata.driver.gates["NodeUnpublishVolume"] = Gate()
    publishing = asyncio.ensure_future(kata.co.publish("vol-1", target))
    await until(gate.entered)
    publishing.cancel()
    await asyncio.wait([publishing])
    assert not gate.cancelled.is_set()
    gate.opened.set()
    kata.driver.alter = lambda _: None
    # the undo still runs
    await repeated(lambda: kata.co.publish("vol-1", target, volume_context=NAMED), Code.ABORTED)
    assert not gate.cancelled.is_set()
    kata.check_published("vol-1", target)


async def test_publish_whose_guard_mount_stays_is_not_final(
    kata: FakeNode, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kata.driver.failures["NodePublishVolume"] = Failure(Code.INTERNAL, "disk on fire")
    with monkeypatch.context() as patched:
        patched.setattr(kata.targets, "unmount_guard", _fail)
        await refused(kata.co.publish("vol-1", target), Code.UNAVAILABLE, "disk on fire")
    await kata.co.unpublish("vol-1", target)
    kata.check_untouched(target)


@pytest.mark.spec("D-21")
async def test_publish_that_cannot_be_undone_keeps_its_device_reserved(
    kata: FakeNode, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver has it, and its guard stands; no look has come since."""
    kata.driver.identities["vol-2"] = fake_driver.identity_of(fake_driver.device_of("vol-1"))
    kata.driver.failing["NodeUnpublishVolume"] = Failure(Code.UNAVAILABLE, "restarting")
    with monkeypatch.context() as patched:
        patched.setattr(Store, "write", _fail)
        await refused(kata.co.publish("vol-1", target), Code.UNAVAILABLE, "UnexpectedError")
    other = kata.co.publish("vol-2", kata.places.target("two"))
    await refused(other, Code.UNAVAILABLE, "DeviceReserved", target)
    kata.driver.failing.clear()
    await kata.co.publish("vol-1", target)
    kata.check_published("vol-1", target)


@pytest.mark.parametrize("then", ["no handler", "driver refuses", "driver downgraded"])
async def test_lost_attempt_is_final_only_if_undone(places: Places, target: str, then: str) -> None:
    """The driver did its work, and the proxy was started again before it heard so."""
    driver = fake_driver.FakeDriver()
    driver.failures_after["NodePublishVolume"] = Failure(Code.UNAVAILABLE, "lost")
    async with FakeNode(places, driver=driver) as node, node.handler():
        await refused(node.co.publish("vol-1", target), Code.UNAVAILABLE, "lost")
        assert target in driver.published
    async with FakeNode(places, driver=driver) as node:
        if then == "no handler":
            await refused(node.co.publish("vol-1", target), Code.UNAVAILABLE, "none is registered")
            assert target in driver.published
            await node.co.unpublish("vol-1", target)
        else:
            driver.defers = then != "driver downgraded"
            if driver.defers:
                driver.failures["NodePublishVolume"] = Failure(Code.INTERNAL, "disk on fire")
            async with node.handler():
                code = Code.INTERNAL if driver.defers else Code.UNAVAILABLE
                await refused(node.co.publish("vol-1", target), code)
                if not driver.defers:  # not called, so nothing is undone
                    await node.co.unpublish("vol-1", target)
                    assert not driver.called("NodeUnpublishVolume")[-1].request.defer_fs_ops
        node.check_untouched(target)


async def test_entry_that_appeared_although_its_publish_failed_is_removed(
    kata: FakeNode, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rename was done, and the directory could not be synced."""
    write = Store.write

    def fail_afterwards(store: Store, record: Record) -> Record:
        write(store, record)
        raise errors.RuntimeFailed("cannot sync")

    monkeypatch.setattr(Store, "write", fail_afterwards)
    await refused(kata.co.publish("vol-1", target), Code.INTERNAL, "cannot sync")
    kata.check_untouched(target)


async def test_failed_publish_that_sandbox_has_claimed_is_not_final(
    kata: FakeNode, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Store.write
    sandbox = kata.sandbox(target)

    def claim_and_fail(store: Store, record: Record) -> Record:
        write(store, record)
        sandbox.__enter__()
        raise errors.RuntimeFailed("cannot sync")

    monkeypatch.setattr(Store, "write", claim_and_fail)
    await refused(kata.co.publish("vol-1", target), Code.UNAVAILABLE, "cannot sync")
    monkeypatch.undo()
    await kata.co.publish("vol-1", target)
    kata.check_published("vol-1", target)
    sandbox.__exit__(None, None, None)


async def _mount_over_the_guard(kata: FakeNode, target: str) -> None:
    """A publish by a driver that ignores the flag, and whose mount cannot be undone."""
    kata.driver.mounts_instead = True
    kata.driver.after["NodePublishVolume"] = lambda: kata.targets.foreign.add(target)
    kata.driver.after["NodeUnpublishVolume"] = lambda: kata.targets.foreign.discard(target)
    kata.driver.failing["NodeUnpublishVolume"] = Failure(Code.UNAVAILABLE, "restarting")
    await refused(kata.co.publish("vol-1", target), Code.UNAVAILABLE, "deferred_mount")
    await refused(kata.co.publish("vol-1", target), Code.UNAVAILABLE, "restarting")
    kata.driver.failing.clear()
    kata.driver.mounts_instead = False
    del kata.driver.after["NodePublishVolume"]


@pytest.mark.parametrize("call", ["unpublish", "publish"])
async def test_next_call_removes_the_mount_of_a_disobedient_driver(
    kata: FakeNode, target: str, call: str
) -> None:
    await _mount_over_the_guard(kata, target)
    # without an entry it is not known that another request made what is there
    await refused(kata.co.publish("vol-1", target, defer=False), Code.UNAVAILABLE, target)
    await getattr(kata.co, call)("vol-1", target)
    if call == "publish":
        kata.check_published("vol-1", target)
    else:
        kata.check_untouched(target)


INLINE_ID = f"csi-{'0a' * 32}"


@pytest.mark.spec("D-10")
async def test_inline_volume_is_known_by_its_id_without_a_pod(kata: FakeNode, target: str) -> None:
    """Without podInfoOnMount there is no key in the context."""
    _other_filesystem(kata)
    await refused(kata.co.publish(INLINE_ID, target), Code.UNAVAILABLE, "'btrfs'")
    assert kata.driver.called("NodeUnpublishVolume") == []
    await kata.co.unpublish(INLINE_ID, target)
    kata.check_untouched(target)


@pytest.mark.spec("D-36")
@pytest.mark.parametrize("error", [MemoryError(), OSError(28, "no space"), ValueError("a bug")])
@pytest.mark.parametrize(
    "where", ["mount_guard", "openers", "write", "identify", "_record", "decide"]
)
async def test_no_exception_ends_in_a_final_code_while_something_stands(
    kata: FakeNode, target: str, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception
) -> None:
    mount_guard = kata.targets.mount_guard

    def fail(*path: Any, **options: Any) -> None:
        if where == "mount_guard":
            mount_guard(*path, **options)
        raise error

    if where == "decide":
        await kata.co.publish("vol-1", target)
    kata.driver.failing["NodeUnpublishVolume"] = Failure(Code.UNAVAILABLE, "restarting")
    owners = {"write": Store, "identify": kata.devices, "_record": Publish, "decide": Policy}
    with monkeypatch.context() as patched:
        patched.setattr(owners.get(where, kata.targets), where, fail)
        await refused(kata.co.publish("vol-1", target), Code.UNAVAILABLE, "UnexpectedError")
    kata.driver.failing.clear()
    await kata.co.unpublish("vol-1", target)
    kata.check_untouched(target)


async def test_unforeseen_exception_before_anything_stands_is_final(
    kata: FakeNode, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Publish, "_record", _fail)
    await refused(kata.co.publish("vol-1", target), Code.INTERNAL, "UnexpectedError")
    kata.check_untouched(target)
