"""A shim that ends while its virtual machine goes on: claim.json says so, and nothing is ended."""

from collections.abc import AsyncIterator

import pytest

from crust.handoff import claims
from crust.handoff.record import Record
from crust.kata import keeper_watch
from crust.kata.keeper_watch import KeeperWatch
from tests.integration.kata.conftest import (
    ONE,
    TWO,
    KataNode,
    MakeDevice,
    container,
    lives,
    pod,
    soon,
)
from tests.support.kata.sandbox import StandInSandbox, a_shim
from tests.support.raised import raised

pytestmark = pytest.mark.root


@pytest.fixture
async def mounted(node: KataNode, device: MakeDevice, one: StandInSandbox) -> Record:
    """A volume that a container of the first sandbox has."""
    record = node.publish("a", device("a").path)
    bridge, app = node.bridge(), container(record.target.text)
    await bridge.create(pod(), app, soon())
    one.create_container(app.id, record.device, "/data0")
    await bridge.start(pod(), app, soon())
    return record


@pytest.fixture
async def watch(node: KataNode, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KeeperWatch]:
    monkeypatch.setattr(keeper_watch, "_GRACE_S", 0.0)
    made = KeeperWatch(node.grants(), node.builds())
    yield made
    made.close()


def _claim(node: KataNode, record: Record) -> claims.Claim:
    claim = node.claim(record)
    assert claim is not None
    return claim


async def test_killed_shim_is_named_in_claim_and_volume_refused(
    node: KataNode, mounted: Record, one: StandInSandbox, two: StandInSandbox, watch: KeeperWatch
) -> None:
    await watch.look_at_keepers()
    assert _claim(node, mounted).state is claims.State.MOUNTED
    one.shim.kill()
    one.shim.wait()
    await watch.look_at_keepers()
    claim = _claim(node, mounted)
    assert (claim.live, claim.is_orphaned, claim.pid) == (True, True, one.pid)
    assert lives(one.process)
    other = container(mounted.target.text, id_="container-0002", pod_id=TWO)
    with raised("HeldBySandbox", match=f"for which process {one.pid} answers.*end-orphan"):
        await node.bridge().create(pod(TWO), other, soon())


async def test_bridge_that_starts_after_the_shim_was_killed_says_it(
    node: KataNode, mounted: Record, one: StandInSandbox, watch: KeeperWatch
) -> None:
    one.shim.kill()
    one.shim.wait()
    await watch.look_at_keepers()
    assert _claim(node, mounted).is_orphaned


async def test_sandbox_that_is_stopped_is_not_called_orphaned(
    node: KataNode,
    mounted: Record,
    one: StandInSandbox,
    watch: KeeperWatch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The shim ends a moment before its machine."""
    monkeypatch.setattr(keeper_watch, "_GRACE_S", 60.0)
    await watch.look_at_keepers()
    one.shim.kill()
    one.shim.wait()
    await watch.look_at_keepers()
    assert _claim(node, mounted).state is claims.State.MOUNTED


def test_shim_is_found_by_its_arguments(one: StandInSandbox) -> None:
    assert list(keeper_watch.shims_of(ONE)) == [one.shim.pid]
    assert keeper_watch.shim_of(ONE) is not None
    assert keeper_watch.shim_of(ONE[:-1]) is None


def test_process_of_another_user_or_program_is_no_shim() -> None:
    """Its arguments say that it is one: it would hide from crust that the sandbox's shim has ended."""
    with a_shim(TWO, user=65534), a_shim(TWO, program="sh"):
        assert keeper_watch.shim_of(TWO) is None
        with a_shim(TWO) as shim:
            assert list(keeper_watch.shims_of(TWO)) == [shim.pid]
