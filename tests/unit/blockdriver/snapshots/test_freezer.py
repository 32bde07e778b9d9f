"""The guests that are frozen for a snapshot, and thawed whatever happens."""

import asyncio
from pathlib import Path
from unittest.mock import Mock

import pytest

from crust.blockdriver import guests
from crust.blockdriver.snapshots import freezer, host_freeze
from crust.blockdriver.snapshots.freezer import Freezer, InGuest
from crust.blockdriver.snapshots.host_freeze import Intent, Intents
from crust.core import errors, volumes
from tests.support.drivers.memory_backend import MemoryBackend
from tests.support.frozen import recovered
from tests.support.runtimes.fake_guests import FakeGuests, Guest

ONE = InGuest(volumes.VolumeId("vol-1"), volumes.TargetPath("/pods/one/mount"), "")
TWO = InGuest(volumes.VolumeId("vol-2"), volumes.TargetPath("/pods/two/mount"), "")


class Node:
    """A freezer, and what it meets. `restart` is a new process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.guests = FakeGuests()
        self.restart()

    def restart(self) -> None:
        self.intents = Intents(str(self.root))
        self.freezer = Freezer(self.intents, MemoryBackend(), self.guests, limit_s=9.5)
        self.freezer.open()

    def noted(self) -> list[str]:
        return sorted(path.name for path in (self.root / "freezes").iterdir())

    def noted_frozen(self) -> Guest:
        """A guest that a process which has ended left frozen, with its intent."""
        guest = self.guests.add(ONE.target.text)
        guest.frozen = True
        self.intents.note(Intent(ONE.volume_id, target=ONE.target.text))
        return guest


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def test_freeze_holds_all_guests_during_block_and_thaws_after(node: Node) -> None:
    made = [node.guests.add(volume.target.text) for volume in (ONE, TWO)]
    async with node.freezer.frozen([ONE, TWO]):
        assert [(guest.frozen, guest.thaw_after_s) for guest in made] == [(True, 10)] * 2
        assert node.noted() == ["vol-1", "vol-2"]
    assert not any(guest.frozen for guest in made)
    assert node.noted() == []


@pytest.mark.parametrize("in_guests", [[], [ONE]], ids=["none", "never published"])
async def test_freeze_without_a_guest_leaves_no_intent(
    node: Node, in_guests: list[InGuest]
) -> None:
    async with node.freezer.frozen(in_guests):
        assert node.noted() == []
    assert len(node.guests.asked) == 2 * len(in_guests)


async def test_freeze_with_an_early_thaw_raises_thawed_early(node: Node) -> None:
    node.guests.add(ONE.target.text)
    two = node.guests.add(TWO.target.text)
    with pytest.raises(host_freeze.ThawedEarly, match="vol-2"):
        async with node.freezer.frozen([ONE, TWO]):
            two.watchdog()
    assert not node.guests.by_target[ONE.target.text].frozen
    assert node.noted() == []


async def test_freeze_with_a_failed_thaw_is_an_error(node: Node) -> None:
    guest = node.guests.add(ONE.target.text)
    with pytest.raises(host_freeze.ThawedEarly):
        async with node.freezer.frozen([ONE]):
            guest.error = errors.PeerUnavailable("the handler is absent")
    assert node.noted() == ["vol-1"], "the next start thaws it"


async def test_freeze_with_a_failing_block_thaws_and_raises(node: Node) -> None:
    guest = node.guests.add(ONE.target.text)
    with pytest.raises(errors.Exhausted, match="full"):
        async with node.freezer.frozen([ONE]):
            raise errors.Exhausted("full")
    assert not guest.frozen
    assert node.noted() == []


async def test_freeze_refused_by_the_second_guest_thaws_the_first(node: Node) -> None:
    one = node.guests.add(ONE.target.text)
    node.guests.add(TWO.target.text).error = errors.NotReady("the handler cannot freeze")
    with pytest.raises(errors.NotReady, match="cannot freeze"):
        async with node.freezer.frozen([ONE, TWO]):
            pytest.fail("it is not copied")
    assert not one.frozen
    assert node.noted() == []


async def test_freeze_with_unknown_outcome_is_thawed(node: Node) -> None:
    """The proxy did not answer in time: the outcome is unknown."""
    guest = node.guests.add(ONE.target.text)
    guest.error = errors.PeerUnavailable("no answer")
    with pytest.raises(errors.PeerUnavailable, match="no answer"):
        async with node.freezer.frozen([ONE]):
            pytest.fail("it is not copied")
    assert node.guests.asked == [("freeze", ONE.target.text), ("thaw", ONE.target.text)]
    assert node.noted() == ["vol-1"]


async def test_freeze_without_a_sandbox_fails_only_if_one_starts(node: Node) -> None:
    guest = node.guests.add(ONE.target.text, running=False)
    async with node.freezer.frozen([ONE]):
        assert node.noted() == []
    with pytest.raises(host_freeze.ThawedEarly, match="began"):
        async with node.freezer.frozen([ONE]):
            guest.running = True
    assert not guest.frozen
    assert node.noted() == []


async def test_sandbox_that_began_is_thawed_whatever_its_freeze_answers(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest, freeze = node.guests.add(ONE.target.text, running=False), node.guests.freeze

    async def unanswered(target: volumes.TargetPath, thaw_after_s: int) -> bool:
        if not await freeze(target, thaw_after_s):
            return False
        raise errors.RuntimeFailed("the answer is lost")

    monkeypatch.setattr(node.guests, "freeze", unanswered)
    with pytest.raises(errors.RuntimeFailed, match="lost"):
        async with node.freezer.frozen([ONE]):
            guest.running = True
    assert (guest.frozen, node.noted()) == (False, [])


async def test_freeze_without_a_runtime_socket_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody was asked, so there is no guest to thaw, and no alarm."""
    intents = Intents(str(tmp_path))
    assert [*intents.open()] == []
    made = Freezer(intents, MemoryBackend(), guests.Guests(), limit_s=10)
    with pytest.raises(errors.NotReady, match="runtime_socket"):
        async with made.frozen([ONE]):
            pytest.fail("it is not copied")
    assert list((tmp_path / "freezes").iterdir()) == []
    assert caplog.records == []


@pytest.mark.parametrize("later", ["", '\0{"later": true}'], ids=["", "of a later version"])
async def test_recovery_thaws_guests_left_frozen(node: Node, later: str) -> None:
    guest, path = node.noted_frozen(), node.root / "freezes" / ONE.volume_id
    path.write_text(path.read_text().removesuffix("\n") + f"{later}\n")
    node.restart()
    await recovered(node.freezer)
    assert (guest.frozen, node.noted()) == (False, [])


async def test_recovery_waits_for_an_unreachable_proxy(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest = node.noted_frozen()
    node.restart()
    thaw, noted = node.guests.thaw, []

    async def away_at_first(target: volumes.TargetPath) -> bool:
        noted.append(node.noted())
        if len(noted) < 3:
            raise errors.PeerUnavailable("the proxy is absent")
        return await thaw(target)

    monkeypatch.setattr(freezer, "_PAUSE_S", 0.001)
    monkeypatch.setattr(node.guests, "thaw", away_at_first)
    await recovered(node.freezer)
    assert noted == [["vol-1"]] * 3
    assert not guest.frozen
    assert node.noted() == []


async def test_thaw_that_does_not_reach_the_guest_is_retried(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy restarts while a guest is frozen: its writers do not wait for their own watchdog."""
    monkeypatch.setattr(freezer, "_PAUSE_S", 0.001)
    guest = node.guests.add(ONE.target.text)
    recovering = asyncio.create_task(node.freezer.keep_recovering())
    for _ in range(2):
        with pytest.raises(host_freeze.ThawedEarly):
            async with node.freezer.frozen([ONE]):
                guest.error = errors.PeerUnavailable("the proxy is absent")
        tries = len(node.guests.asked)
        while len(node.guests.asked) < tries + 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert (guest.frozen, node.noted()) == (True, ["vol-1"])
        guest.error = None
        while node.noted():  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert not guest.frozen
    recovering.cancel()
    await asyncio.wait([recovering])


@pytest.mark.parametrize("is_running", [True, False])
async def test_copy_whose_intent_cannot_be_removed_counts(
    node: Node, monkeypatch: pytest.MonkeyPatch, *, is_running: bool
) -> None:
    """The filesystem is thawed: the driver removes the intent later."""
    guest = node.guests.add(ONE.target.text, running=is_running)
    with monkeypatch.context() as patched:
        patched.setattr(Intents, "forget", Mock(side_effect=errors.RuntimeFailed("EIO")))
        async with node.freezer.frozen([ONE]):
            pass
    assert (guest.frozen, node.noted()) == (False, ["vol-1"])
    await recovered(node.freezer)
    assert node.noted() == []


@pytest.mark.parametrize("error", [errors.NotFound("not deferred"), errors.NotReady("no")])
async def test_intent_with_a_final_error_is_dropped(node: Node, error: errors.CrustError) -> None:
    node.noted_frozen().error = error
    node.restart()
    await recovered(node.freezer)
    assert node.noted() == []


async def test_recovery_does_not_thaw_a_new_freeze(node: Node) -> None:
    guest = node.noted_frozen()
    node.restart()
    async with node.freezer.frozen([ONE]):
        await recovered(node.freezer)
        assert guest.frozen
    assert node.noted() == []


async def test_intents_of_another_boot_and_invalid_ones_are_ignored(node: Node) -> None:
    folder = node.root / "freezes"
    for name, text in (("vol-1", "another-boot guest:/pods/one/mount\n"), ("vol-2", "\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)
    assert [*node.intents.open()] == []
    assert node.noted() == []
    node.intents.note(Intent(ONE.volume_id, target="relative"))
    node.restart()
    await recovered(node.freezer)
    assert node.noted() == []
