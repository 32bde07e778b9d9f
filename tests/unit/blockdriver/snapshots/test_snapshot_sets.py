"""Sets of snapshots: records, pages, removal, a full pool at each write; and the guests that are frozen for them."""

import asyncio
import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from crust.blockdriver import guests
from crust.blockdriver.driver import Driver
from crust.blockdriver.snapshots import freezer, host_freeze
from crust.blockdriver.snapshots.freezer import Freezer, InGuest
from crust.blockdriver.snapshots.host_freeze import Intent, Intents
from crust.core import errors, volumes
from tests.support.drivers import driver_state
from tests.support.drivers.memory_backend import MemoryBackend, MemoryTaking
from tests.support.faults.crashes import at_call, no_space
from tests.support.raised import raised
from tests.support.records import pool_layout
from tests.support.runtimes.fake_guests import FakeGuests, Guest

Take = Callable[[Driver, "list[volumes.VolumeId]"], None]


def take_group(driver: Driver, ids: list[volumes.VolumeId]) -> None:
    asyncio.run(driver.controller.snapshots.create_group("g", ids))


def take_one(driver: Driver, ids: list[volumes.VolumeId]) -> None:
    asyncio.run(driver.controller.snapshots.create("s", ids[0]))


def two_volumes(driver: Driver) -> list[volumes.VolumeId]:
    provisioner = driver.controller.provisioner

    async def create() -> list[volumes.VolumeId]:
        made = [await provisioner.create(driver_state.create(name)) for name in ("a", "b")]
        return [volumes.VolumeId(volume.volume_id) for volume in made]

    return asyncio.run(create())


@pytest.mark.parametrize("take", [take_one, take_group])
def test_take_with_one_failed_write_leaves_all_or_nothing(tmp_path: Path, take: Take) -> None:
    for number in range(1000):
        root = tmp_path / str(number)
        root.mkdir()
        backend = MemoryBackend()
        driver = driver_state.opened(root, backend=backend)
        ids = two_volumes(driver)
        failed = False
        with at_call(number, no_space) as count:
            try:
                take(driver, ids)
            except errors.CrustError:
                failed = True
        if count() <= number:
            assert number > 5
            return
        if failed:
            asyncio.run(driver.collect_garbage())
            left = pool_layout.set_records(root / "state"), backend.snapshots
            assert left == (set(), {}), number
        take(driver, ids)
    raise AssertionError("the operation has no end")


def test_group_on_a_full_pool_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies fill the pool, so the record cannot be written."""
    backend = MemoryBackend()
    driver = driver_state.opened(tmp_path, backend=backend)
    ids = two_volumes(driver)

    def full(_: MemoryTaking, record: bytes) -> None:
        raise errors.Exhausted("cannot write", why=os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(MemoryTaking, "commit", full)
        with pytest.raises(errors.Exhausted):
            take_group(driver, ids)
    assert (pool_layout.set_records(tmp_path / "state"), backend.snapshots) == (set(), {})
    assert driver.stores.provisioning.unsettled() == ()


def test_member_of_a_group_is_not_deleted_alone(tmp_path: Path) -> None:
    driver = driver_state.opened(tmp_path)
    take_group(driver, two_volumes(driver))
    kept, member = next(driver.controller.snapshots.page("", ""))
    with raised("SnapshotBelongsToGroup"):
        driver.controller.snapshots.delete(member.snapshot_id)
    driver.controller.snapshots.delete_group(
        kept.set_id, [snapshot.snapshot_id for snapshot in kept.snapshots]
    )
    driver.controller.snapshots.delete(member.snapshot_id)
    assert list(driver.controller.snapshots.page("", "")) == []


def test_call_for_snapshot_finds_no_group_and_vice_versa(tmp_path: Path) -> None:
    driver = driver_state.opened(tmp_path)
    ids = two_volumes(driver)
    take_group(driver, ids)
    take_one(driver, ids)
    sets, pool_ids = driver.controller.snapshots, driver.stores.pool.ids
    group, single = pool_ids.group_id("g"), pool_ids.snapshot_id("s")
    with raised("SnapshotNotFound"):
        sets.find(group)
    with raised("GroupNotFound"):
        sets.get_group(single, [single])
    sets.delete(group)
    sets.delete_group(single, [single])
    assert {kept.set_id for kept, _ in sets.page("", "")} == {group, single}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_pages_have_each_snapshot_once(tmp_path: Path, count: int) -> None:
    driver = driver_state.opened(tmp_path)
    ids = two_volumes(driver)
    for name in ("g", "h"):
        asyncio.run(driver.controller.snapshots.create_group(name, ids))
    for name in ("s", "t", "u"):
        asyncio.run(driver.controller.snapshots.create(name, ids[0]))
    for source, wanted in (("", 7), (ids[0], 5), (ids[1], 2)):
        listed: list[str] = []
        while page := list(
            itertools.islice(driver.controller.snapshots.page(source, (listed or [""])[-1]), count)
        ):
            listed += [snapshot.snapshot_id for _, snapshot in page]
        assert len(listed) == len(set(listed)) == wanted


async def test_collect_leaves_a_snapshot_that_a_call_takes_alone(tmp_path: Path) -> None:
    """What is half made is removed by the collection, and not while a call works on it."""
    driver = driver_state.opened(tmp_path)
    set_id = volumes.VolumeId(driver.stores.pool.ids.snapshot_id("s"))
    (tmp_path / "state" / "snapshots" / f".new-{set_id}").mkdir()

    async def during() -> None:
        await driver.collect_garbage()
        assert driver.stores.provisioning.unsettled() == (set_id,)

    await driver.stores.running.run(set_id, "CreateSnapshot", None, during)
    await driver.collect_garbage()
    assert driver.stores.provisioning.unsettled() == ()


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


async def test_freeze_without_a_runtime_socket_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody was asked, so there is no guest to thaw, and no alarm."""
    intents = Intents(str(tmp_path))
    intents.open()
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
    await node.freezer.recover()
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
    await node.freezer.recover()
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


@pytest.mark.parametrize("error", [errors.NotFound("not deferred"), errors.NotReady("no")])
async def test_intent_with_a_final_error_is_dropped(node: Node, error: errors.CrustError) -> None:
    node.noted_frozen().error = error
    node.restart()
    await node.freezer.recover()
    assert node.noted() == []


async def test_recovery_does_not_thaw_a_new_freeze(node: Node) -> None:
    guest = node.noted_frozen()
    node.restart()
    async with node.freezer.frozen([ONE]):
        await node.freezer.recover()
        assert guest.frozen
    assert node.noted() == []


def test_intents_of_another_boot_and_invalid_ones_are_ignored(node: Node) -> None:
    folder = node.root / "freezes"
    for name, text in (("vol-1", "another-boot guest:/pods/one/mount\n"), ("vol-2", "\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)
    assert node.intents.open() == ()
    assert node.noted() == []
    node.intents.note(Intent(ONE.volume_id, target="relative"))
    node.restart()
    assert node.noted() == []
