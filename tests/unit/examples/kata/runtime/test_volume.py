"""One volume in one sandbox: the claim lives exactly as long as the guest may have the device."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from crust.blockdriver.ceph.claims import Host
from crust.core import errors, volumes
from crust.handoff import claims, store
from crust.handoff.claims import State
from crust.handoff.record import Record
from crust.runtime_handler.registration import RegisterRequest, Registration
from examples.kata.runtime import handoff, volume
from examples.kata.runtime.ceph_images import CephImages
from examples.kata.runtime.taken_images import Taken, TakenImages
from examples.kata.vm import faults
from tests.support.fake_vms.handoff import FakeClaim, FakeHandoff
from tests.support.fake_vms.vms import FakeVm
from tests.support.fake_vms.world import RunningVm, World
from tests.support.raised import raised
from tests.support.records.records import IMAGE, TARGET, a_record

ONE, TWO = volumes.SandboxId("one"), volumes.SandboxId("two")
FEATURES = frozenset(volumes.HandlerFeature)


@pytest.fixture
def world() -> World:
    return World(records={TARGET.text: a_record()})


def vm_of(world: World, name: str) -> FakeVm:
    directory = Path("/sandboxes") / name
    return FakeVm(world, world.bodies.setdefault(directory, RunningVm(directory)))


async def take(world: World, sandbox: volumes.SandboxId) -> volume.SandboxVolume:
    handed = FakeHandoff(world)
    return await volume.claim_and_mount(
        handed, world.records[TARGET.text], sandbox, vm_of(world, sandbox), volume.ClaimsInHand()
    )


async def test_vm_holds_lock_and_device_before_attach(world: World) -> None:
    taken = await take(world, ONE)
    assert world.calls == ["held", "hold", "attach", "limit", "mount", "own", "grow"]
    assert taken.claim.fds == ()
    claim = world.claims[TARGET]
    assert claim.states == [(State.MOUNTED, "")]
    assert claim.is_locked(), "by the VM alone"


async def test_read_only_volume_is_not_grown(world: World) -> None:
    world.records[TARGET.text] = a_record(readonly=True)
    await take(world, ONE)
    assert not {"grow", "own"} & set(world.calls)


@pytest.mark.parametrize("step", ["hold", "attach", "limit", "mount", "own", "grow"])
async def test_failed_step_releases_the_claim_and_records_the_reason(
    world: World, step: str
) -> None:
    world.failures[step].append(faults.GuestRefused("a bad option"))
    with pytest.raises(faults.GuestRefused, match="a bad option"):
        await take(world, ONE)
    assert world.claims[TARGET].states[-1] == (State.ERROR, "[GuestRefused] a bad option")
    body = vm_of(world, ONE).body
    assert (body.plugged, body.mounted, dict(body.nodes)) == (set(), set(), {})
    await take(world, TWO)


@pytest.mark.parametrize("stuck", ["unmount", "detach"])
async def test_claim_is_kept_while_the_guest_may_have_the_device(world: World, stuck: str) -> None:
    """A mount that timed out continues in the guest; a sandbox that claims the volume then is a second kernel."""
    world.failures["mount"].append(faults.AgentTimedOut("mount", 120))
    world.failures[stuck].append(faults.GuestBusy("somebody uses it"))
    with pytest.raises(faults.AgentTimedOut):
        await take(world, ONE)
    assert "release" not in world.calls
    with pytest.raises(claims.HeldBySandbox):
        await take(world, TWO)
    assert world.claims[TARGET].states[-1][0] is State.ERROR
    await take(world, ONE)
    assert world.claims[TARGET].states[-1] == (State.MOUNTED, "")


LIMITS = volumes.IoLimits(read_iops=100, write_bytes_per_second=1 << 20)


@pytest.mark.spec("H-36")
async def test_record_limits_are_set_before_mount(world: World) -> None:
    world.records[TARGET.text] = limited(LIMITS)
    world.failures["mount"].append(faults.GuestRefused("a bad option"))
    with pytest.raises(faults.GuestRefused):
        await take(world, ONE)
    assert world.calls.index("limit") < world.calls.index("mount")
    await take(world, TWO)
    (limits,) = vm_of(world, TWO).body.limits.values()
    assert limits == LIMITS


@pytest.mark.spec("H-37")
async def test_resume_sets_the_current_limits_of_the_record(world: World) -> None:
    """The daemon died before it set the limits, or the proxy changed the record meanwhile."""
    world.records[TARGET.text] = limited(LIMITS)
    await take(world, ONE)
    world.records[TARGET.text] = limited(volumes.IoLimits())
    world.claims[TARGET].record = world.records[TARGET.text]
    await take(world, ONE)
    (limits,) = vm_of(world, ONE).body.limits.values()
    assert limits == volumes.IoLimits()


async def test_resume_thaws_a_frozen_volume(world: World) -> None:
    """No caller can thaw it before it is adopted, and growing a frozen filesystem waits for the thaw."""
    taken = await take(world, ONE)
    await vm_of(world, ONE).guest.freeze(taken.serial, 60)
    async with asyncio.timeout(60):
        await take(world, ONE)
    assert vm_of(world, ONE).body.frozen == set()


def limited(limits: volumes.IoLimits) -> Record:
    record = a_record()
    return record.replaced(replace(record.mount, io_limits=limits))


async def test_failed_resume_keeps_the_claim_with_the_vm(world: World) -> None:
    await take(world, ONE)
    world.failures["mount"].append(faults.GuestConflict("mounted otherwise"))
    with pytest.raises(faults.GuestConflict):
        await take(world, ONE)
    assert world.is_locked(TARGET)


async def test_partially_held_claim_is_released_and_claimed_again(world: World) -> None:
    """The daemon died after giving only the lock: without the exclusive hold, mkfs on the host would succeed."""
    vm = vm_of(world, ONE)
    claim = FakeHandoff(world).claim(TARGET, ONE)
    vm.body.nodes[volume.serial_of(world.records[TARGET.text])] = [claim.fds[0]]
    claim.close()
    await take(world, ONE)
    taken_out, taken = (
        ["unmount", "detach", "release"],
        ["hold", "attach", "limit", "mount", "own", "grow"],
    )
    assert world.calls == ["held", *taken_out, *taken]
    assert world.claims[TARGET] is not claim


async def test_dead_vm_holds_no_claim(world: World) -> None:
    await take(world, ONE)
    vm_of(world, ONE).body.ended.set()
    with pytest.raises(faults.QmpDisconnected):
        await take(world, ONE)
    await take(world, TWO)


class FullDisk(FakeClaim):
    """A claim whose claim.json cannot be written."""

    def report_mounted(self) -> None:
        raise errors.Exhausted("no space left")

    def report_error(self, error: str) -> None:
        raise errors.Exhausted("no space left")


async def test_claim_is_released_when_its_report_fails(world: World) -> None:
    with pytest.raises(errors.Exhausted):
        await volume.claim_and_mount(
            FakeHandoff(world, FullDisk), a_record(), ONE, vm_of(world, ONE), volume.ClaimsInHand()
        )
    await take(world, TWO)


def published(root: Path, source: volumes.NetworkImage | None = None) -> Record:
    entries = store.Store(str(root))
    entries.open()
    return entries.write(a_record(source=source) if source else a_record()).require()


def test_a_volume_of_another_handler_is_refused(tmp_path: Path) -> None:
    record = published(tmp_path / "volumes")
    name = volumes.HandlerName("other")
    request = RegisterRequest(name, "1", "/other.sock", frozenset({"ext4"}))
    session = Registration(str(tmp_path / "proxy.sock"), request)
    images = CephImages(Host("node-1", "machine-1"), tmp_path / "images")
    other = handoff.Directory(str(tmp_path / "volumes"), name, session, images)
    with raised("WrongHandler", match="published to kata"):
        other.claim(record.target, ONE)
    assert other.records() == (record,)


async def ended(root: Path, directory: Path, record: Record) -> tuple[handoff.Directory, Taken]:
    """A handler's directory, and an image that a virtual machine of an earlier daemon has left."""
    request = RegisterRequest(record.handler, "1", "/h.sock", frozenset({"ext4"}), FEATURES)
    session = Registration(str(directory / "proxy.sock"), request)
    TakenImages(directory / "images").add(Taken("uuid", ONE, record.target, IMAGE))
    images = CephImages(Host("node-1", "machine-1"), directory / "images")
    made = handoff.Directory(str(root), record.handler, session, images)
    [left] = made.taken()
    return made, left


@pytest.mark.spec("H-52")
async def test_image_whose_volume_is_published_no_more_is_forgotten(tmp_path: Path) -> None:
    """No key is to be had for it; also if another volume is published there by now."""
    record = published(tmp_path / "volumes", IMAGE)
    for root, now in (
        (tmp_path / "none", record),
        (tmp_path / "other", published(tmp_path / "other")),
    ):
        directory, left = await ended(root, tmp_path, record)
        with pytest.raises(errors.NotFound):
            await directory.give_back_of_ended(left)
        assert directory.taken() == ()
        assert now.target == left.target


@pytest.mark.spec("H-52")
async def test_image_stays_noted_while_claimed_or_without_its_key(
    tmp_path: Path,
) -> None:
    root = tmp_path / "volumes"
    directory, left = await ended(root, tmp_path, published(root, IMAGE))
    with directory.claim(left.target, TWO), pytest.raises(claims.HeldBySandbox):
        await directory.give_back_of_ended(left)
    with pytest.raises(errors.PeerUnavailable, match="not registered"):
        await directory.give_back_of_ended(left)
    assert directory.taken() == (left,)
    directory.claim(left.target, TWO).release()


@pytest.mark.spec("H-51", "H-52")
async def test_image_is_claimed_before_opening_and_recorded_before_guest_use(
    world: World,
) -> None:
    world.records[TARGET.text] = a_record(source=IMAGE)
    await take(world, ONE)
    assert world.calls[:7] == ["held", "hold", "note", "take", "attach", "record", "limit"]
    assert world.images == {str(IMAGE): "uuid of one"}


@pytest.mark.parametrize("step", ["note", "take", "attach", "record", "limit", "mount"])
async def test_failed_step_gives_image_back_when_vm_has_closed_it(world: World, step: str) -> None:
    world.records[TARGET.text] = a_record(source=IMAGE)
    world.failures[step].append(faults.GuestRefused("no"))
    with pytest.raises(faults.GuestRefused):
        await take(world, ONE)
    assert (world.images, world.taken) == ({}, {})
    assert world.calls[-3:] == ["detach", "give back", "release"]
    await take(world, TWO)


@pytest.mark.spec("H-55")
async def test_image_is_not_closed_while_its_cluster_does_not_answer(world: World) -> None:
    """QEMU would wait for it in the loop that serves the other disks, too."""
    world.records[TARGET.text] = a_record(source=IMAGE)
    world.failures["mount"].append(faults.GuestRefused("no"))
    world.failures["size"].append(errors.PeerUnavailable("the cluster does not answer"))
    with pytest.raises(faults.GuestRefused):
        await take(world, ONE)
    assert "detach" not in world.calls
    assert world.is_locked(TARGET)
    await take(world, ONE)
    assert world.claims[TARGET].states[-1] == (State.MOUNTED, "")


async def test_image_that_earlier_daemon_plugged_is_resumed_without_key(world: World) -> None:
    world.records[TARGET.text] = a_record(source=IMAGE)
    world.failures["mount"].append(faults.AgentTimedOut("mount", 120))
    world.failures["unmount"].append(faults.GuestBusy("somebody uses it"))
    with pytest.raises(faults.AgentTimedOut):
        await take(world, ONE)
    world.calls.clear()
    await take(world, ONE)
    assert not {"take", "record", "secrets"} & set(world.calls)


async def test_image_that_cannot_be_given_back_does_not_keep_volume(world: World) -> None:
    world.records[TARGET.text] = a_record(source=IMAGE)
    world.failures["mount"].append(faults.GuestRefused("no"))
    world.failures["give back"].append(errors.PeerUnavailable("the cluster does not answer"))
    with pytest.raises(faults.GuestRefused):
        await take(world, ONE)
    assert not world.is_locked(TARGET)


async def test_passphrase_is_asked_for_only_if_container_is_not_open(world: World) -> None:
    world.records[TARGET.text] = a_record(encryption=volumes.Encryption.LUKS)
    await take(world, ONE)
    assert "secrets" not in world.calls


async def test_passphrase_is_asked_for_while_the_claim_is_held(world: World) -> None:
    world.records[TARGET.text] = a_record(encryption=volumes.Encryption.LUKS)
    world.secrets["passphrase"] = "correct horse"
    world.failures["mount"].append(faults.GuestNeedsPassphrase("it is not open"))
    await take(world, ONE)
    assert world.calls[:8] == [
        "held", "hold", "attach", "limit", "mount", "secrets", "mount", "own",
    ]  # fmt: skip


async def test_wrong_passphrase_is_written_into_claim_and_gives_it_back(world: World) -> None:
    world.records[TARGET.text] = a_record(encryption=volumes.Encryption.LUKS)
    world.secrets["passphrase"] = "wrong horse"
    reason = faults.WrongPassphrase("the passphrase does not open it")
    world.failures["mount"] += [faults.GuestNeedsPassphrase("it is not open"), reason]
    with pytest.raises(faults.WrongPassphrase):
        await take(world, ONE)
    message = "[WrongPassphrase] the passphrase does not open it"
    assert world.claims[TARGET].states[-1] == (State.ERROR, message)
    assert not world.claims[TARGET].is_locked()
