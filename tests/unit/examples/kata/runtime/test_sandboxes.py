"""The sandboxes of one node: races, kills, adoption. VMs are fakes that outlive the daemon; directories are real."""

import asyncio
from pathlib import Path

import pytest

from crust.core import errors, operations, volumes
from crust.handoff.claims import State
from examples.kata.runtime import handler, messages, ports, sandbox
from examples.kata.runtime.sandboxes import Sandboxes, SandboxNotAdopted
from examples.kata.vm import faults
from tests.support.drivers.fake_driver import Gate
from tests.support.fake_vms.handoff import FakeHandoff
from tests.support.fake_vms.vms import FakeVm, FakeVms
from tests.support.fake_vms.world import World
from tests.support.faults.refusals import until
from tests.support.records.records import IMAGE, TARGET, a_record

ONE, TWO = volumes.SandboxId("one"), volumes.SandboxId("two")


@pytest.fixture
def world() -> World:
    return World(records={TARGET.text: a_record()})


def daemon(tmp_path: Path, world: World) -> Sandboxes:
    """A daemon's sandboxes; a second one is its successor."""
    return Sandboxes(tmp_path / "sandboxes", FakeVms(world), FakeHandoff(world))


def run(*sources: str) -> messages.Run:
    mounts = tuple(messages.Mount(source=source, destination="/data") for source in sources)
    return messages.Run(sandbox="one", argv=("true",), mounts=mounts, keep=True)


async def test_two_clients_get_one_vm(tmp_path: Path, world: World) -> None:
    sandboxes = daemon(tmp_path, world)
    first, second = await asyncio.gather(sandboxes.get(ONE), sandboxes.get(ONE))
    assert first is second
    assert world.calls == ["start"]
    containers = await asyncio.gather(*(first.start(run(TARGET.text)) for _ in range(3)))
    assert len(containers) == 3
    assert world.calls.count("mount") == 1


async def test_slow_start_does_not_block_other_sandboxes(tmp_path: Path, world: World) -> None:
    sandboxes = daemon(tmp_path, world)
    await sandboxes.get(TWO)
    gate = world.gates["start"] = Gate()
    starting = asyncio.create_task(sandboxes.get(ONE))
    await until(gate.entered)
    async with asyncio.timeout(60):
        await sandboxes.get(TWO)
    gate.opened.set()
    await starting


async def test_stop_waits_for_a_running_start(tmp_path: Path, world: World) -> None:
    sandboxes = daemon(tmp_path, world)
    gate = world.gates["start"] = Gate()
    starting = asyncio.create_task(sandboxes.get(ONE))
    await until(gate.entered)
    stopping = asyncio.create_task(sandboxes.stop(ONE))
    gate.opened.set()
    await asyncio.gather(starting, stopping)
    assert world.bodies == {}
    assert sandboxes.all() == []


async def test_failed_start_raises_to_all_callers_and_leaves_no_directory(
    tmp_path: Path, world: World
) -> None:
    sandboxes = daemon(tmp_path, world)
    world.failures["start"].append(faults.VmStartFailed(tmp_path, "no kernel", ""))
    ended = await asyncio.gather(sandboxes.get(ONE), sandboxes.get(ONE), return_exceptions=True)
    assert [type(result) for result in ended] == [faults.VmStartFailed] * 2
    assert not (tmp_path / "sandboxes" / "one").exists()
    await sandboxes.get(ONE)


async def test_second_stop_does_not_remove_a_restarted_sandbox(
    tmp_path: Path, world: World
) -> None:
    sandboxes = daemon(tmp_path, world)
    await sandboxes.get(ONE)
    gate = world.gates["shutdown"] = Gate()
    stops = [asyncio.create_task(sandboxes.stop(ONE)) for _ in range(2)]
    await until(gate.entered)
    gate.opened.set()
    await asyncio.gather(*stops)
    again = await sandboxes.get(ONE)
    assert sandboxes.all() == [again]
    assert (tmp_path / "sandboxes" / "one" / "machine.json").exists()
    assert world.calls.count("shutdown") == 1


async def test_stopping_sandbox_refuses_containers(tmp_path: Path, world: World) -> None:
    sandboxes = daemon(tmp_path, world)
    one = await sandboxes.get(ONE)
    gate = world.gates["shutdown"] = Gate()
    stopping = asyncio.create_task(sandboxes.stop(ONE))
    await until(gate.entered)
    with pytest.raises(sandbox.SandboxStopping):
        await (await sandboxes.get(ONE)).start(run())
    gate.opened.set()
    await stopping
    with pytest.raises(sandbox.SandboxStopping):
        await one.start(run(TARGET.text))


async def test_stop_waits_until_the_keeper_has_ended_too(tmp_path: Path, world: World) -> None:
    """It sees the end of its VM a moment later; until then the claim cannot be released."""
    sandboxes = daemon(tmp_path, world)
    await (await sandboxes.get(ONE)).start(run(TARGET.text))
    claim, refused = world.claims[TARGET], asyncio.Event()
    claim.is_kept = refused.set
    stopping = asyncio.create_task(sandboxes.stop(ONE))
    await until(refused)
    claim.is_kept = None
    await stopping
    assert claim.is_given_back
    assert TARGET not in world.claims


async def test_stop_leaves_a_dead_claim_if_the_keeper_stays(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "_HELD_S", 0.0)
    sandboxes = daemon(tmp_path, world)
    await (await sandboxes.get(ONE)).start(run(TARGET.text))
    world.claims[TARGET].is_kept = lambda: None
    await sandboxes.stop(ONE)
    assert sandboxes.all() == []
    assert TARGET in world.claims


async def test_claim_is_taken_again_while_its_disk_is_just_plugged(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeper and standby are killed meanwhile: only this process's descriptors hold the claim."""
    found: list[ports.LostClaims] = []
    monkeypatch.setattr(FakeVm, "keeper_socket", tmp_path / "keeper.sock")
    monkeypatch.setattr(FakeHandoff, "recover", lambda _, lost: found.append(lost))
    made = await daemon(tmp_path, world).get(ONE)
    gate = world.gates["attach"] = Gate()
    starting = asyncio.create_task(made.start(run(TARGET.text)))
    await until(gate.entered)
    await made.recover_claims()
    gate.opened.set()
    await starting
    ((used, in_hand),) = [(lost.used, lost.in_hand) for lost in found]
    assert list(used.values()) == [TARGET]
    assert used.keys() == in_hand.keys()


async def test_stop_kills_a_guest_that_hangs_during_mount(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "_MOUNT_TIMEOUT_S", 0)
    sandboxes = daemon(tmp_path, world)
    gate = world.gates["mount"] = Gate()
    running = asyncio.create_task((await sandboxes.get(ONE)).start(run(TARGET.text)))
    await until(gate.entered)
    stopping = asyncio.create_task(sandboxes.stop(ONE))
    await until(world.killed)
    gate.opened.set()  # the connection has ended: the fake's call returns, and fails
    with pytest.raises(errors.CrustError):
        await running
    await stopping
    assert not world.is_locked(TARGET)
    assert sandboxes.all() == []


async def test_vm_exit_removes_its_sandbox(tmp_path: Path, world: World) -> None:
    sandboxes = daemon(tmp_path, world)
    await (await sandboxes.get(ONE)).start(run(TARGET.text))
    directory, body = next(iter(world.bodies.items()))
    body.ended.set()
    await until(world.killed)
    await sandboxes.stop(ONE)  # joins what the VM's end began
    assert sandboxes.all() == []
    assert not directory.exists()
    assert TARGET not in world.claims
    again = await sandboxes.get(ONE)
    await again.start(run(TARGET.text))


async def test_close_keeps_vms_and_their_directories(tmp_path: Path, world: World) -> None:
    sandboxes = daemon(tmp_path, world)
    await (await sandboxes.get(ONE)).start(run(TARGET.text))
    await sandboxes.close()
    with pytest.raises(operations.ShuttingDown):
        await sandboxes.stop(ONE)
    assert (tmp_path / "sandboxes" / "one" / "machine.json").exists()
    assert world.is_locked(TARGET)


@pytest.mark.parametrize("step", ["hold", "attach", "mount", "grow"])
async def test_next_daemon_finishes_an_interrupted_mount(
    tmp_path: Path, world: World, step: str
) -> None:
    """The old daemon must not release the claim: its connection has ended, and the mount continues in the guest."""
    sandboxes = daemon(tmp_path, world)
    gate = world.gates[step] = Gate()
    running = asyncio.create_task((await sandboxes.get(ONE)).start(run(TARGET.text)))
    await until(gate.entered)
    await sandboxes.close()
    gate.opened.set()
    with pytest.raises(faults.AgentDisconnected):
        await running
    assert world.is_locked(TARGET)
    successor = daemon(tmp_path, world)
    await successor.adopt_all()
    assert [volume.target for volume in successor.all()[0].held] == [TARGET]
    assert world.claims[TARGET].states[-1][0] is State.MOUNTED


async def adopted(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> tuple[Sandboxes, sandbox.Sandbox]:
    """What a second daemon has adopted, which tries again when the test does."""
    first = daemon(tmp_path, world)
    await (await first.get(ONE)).start(run(TARGET.text))
    await first.close()
    world.failures["thaw"].insert(0, faults.AgentTimedOut("thaw", 50))
    monkeypatch.setattr(sandbox, "AGAIN_S", 3600)
    successor = daemon(tmp_path, world)
    await successor.adopt_all()
    await asyncio.sleep(0)  # its own tries have begun to wait
    monkeypatch.setattr(sandbox, "AGAIN_S", 0)
    one = successor.all()[0]
    assert (one.held, list(one.mount_failures)) == ((), [TARGET])
    return successor, one


async def test_volume_of_silent_guest_is_adopted_once_it_answers(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod that has it starts no other container, which would try it again."""
    world.failures["thaw"] = [faults.AgentTimedOut("thaw", 50) for _ in range(2)]
    successor, one = await adopted(tmp_path, world, monkeypatch)
    await one.keep_adopting()
    assert [volume.target for volume in one.held] == [TARGET]
    assert (one.mount_failures, world.failures["thaw"]) == ({}, [])
    await successor.close()


async def test_volume_whose_adoption_is_refused_is_not_tried_again(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = errors.Conflict("other options")
    world.failures["thaw"] = [refused]
    successor, one = await adopted(tmp_path, world, monkeypatch)
    await one.keep_adopting()
    assert one.mount_failures == {TARGET: refused}
    await successor.close()


async def test_adopt_ignores_a_lock_not_held_by_the_vm(tmp_path: Path, world: World) -> None:
    """The daemon died before QEMU had the claim; now the proxy holds the lock to unpublish the entry."""
    sandboxes = daemon(tmp_path, world)
    await sandboxes.get(ONE)
    FakeHandoff(world).claim(TARGET, ONE)
    await sandboxes.close()
    successor = daemon(tmp_path, world)
    await successor.adopt_all()
    assert successor.all()[0].held == ()
    assert not {"attach", "mount"} & set(world.calls)


async def test_adopt_without_handoff_entry_succeeds(
    tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    sandboxes = daemon(tmp_path, world)
    await (await sandboxes.get(ONE)).start(run(TARGET.text))
    await sandboxes.close()
    world.records.clear()
    successor = daemon(tmp_path, world)
    await successor.adopt_all()
    assert successor.all()[0].held == ()
    assert "without handoff entry" in caplog.text


async def test_unadoptable_vm_blocks_nobody_and_can_be_stopped(
    tmp_path: Path, world: World
) -> None:
    sandboxes = daemon(tmp_path, world)
    await (await sandboxes.get(ONE)).start(run(TARGET.text))
    await sandboxes.get(TWO)
    await sandboxes.close()
    world.failures["adopt one"].append(faults.AgentTimedOut("hello", 60))
    successor = daemon(tmp_path, world)
    await successor.adopt_all()
    assert [kept.sandbox_id for kept in successor.all()] == [TWO]
    assert successor.not_adopted() == [ONE]
    with pytest.raises(SandboxNotAdopted, match="did not answer hello"):
        await successor.get(ONE)
    assert world.is_locked(TARGET)
    await successor.stop(ONE)
    assert not world.is_locked(TARGET)
    await successor.get(ONE)


async def test_adopt_kills_halted_qemu_before_removing_its_directory(
    tmp_path: Path, world: World
) -> None:
    """`adopt` raises VmGone for a VM whose accelerator failed, and its process still holds the claims."""
    sandboxes = daemon(tmp_path, world)
    await (await sandboxes.get(ONE)).start(run(TARGET.text))
    await sandboxes.close()
    world.failures["adopt one"].append(faults.VmGone(tmp_path, "QEMU stopped: internal-error"))
    successor = daemon(tmp_path, world)
    await successor.adopt_all()
    assert "destroy one" in world.calls
    assert not world.is_locked(TARGET)
    assert (successor.all(), successor.not_adopted()) == ([], [])
    assert not (tmp_path / "sandboxes" / "one").exists()


async def test_start_ignores_unknown_files_in_sandbox_dir(tmp_path: Path, world: World) -> None:
    (tmp_path / "sandboxes").mkdir()
    (tmp_path / "sandboxes" / "notes.txt").write_text("of the operator")
    await daemon(tmp_path, world).adopt_all()
    assert (tmp_path / "sandboxes" / "notes.txt").exists()


async def test_failed_mount_is_reported_and_retried(tmp_path: Path, world: World) -> None:
    sandboxes = daemon(tmp_path, world)
    await (await sandboxes.get(ONE)).start(run(TARGET.text))
    await sandboxes.close()
    world.failures["mount"].append(faults.GuestFilesystemCorrupt("a damaged journal"))
    successor = daemon(tmp_path, world)
    await successor.adopt_all()
    answers = handler.Volumes(successor)
    condition = await answers.health(TARGET)
    assert condition.abnormal
    assert "damaged journal" in condition.message
    with pytest.raises(handler.SandboxMountFailed, match="damaged journal"):
        await answers.stats(TARGET)
    await successor.all()[0].start(run(TARGET.text))
    assert not (await answers.health(TARGET)).abnormal


@pytest.mark.spec("H-52")
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("mounted", [False, True])
async def test_image_is_given_back_at_the_end_of_its_sandbox(
    tmp_path: Path, world: World, *, restarted: bool, mounted: bool
) -> None:
    """Also one that could not be mounted, and one of an earlier daemon: only a live sandbox gets a key."""
    world.records[TARGET.text] = a_record(source=IMAGE)
    sandboxes = daemon(tmp_path, world)
    if not mounted:
        world.failures["mount"] += [faults.AgentTimedOut("mount", 120)] * 2
        world.failures["unmount"].append(faults.GuestBusy("somebody uses it"))
    started = (await sandboxes.get(ONE)).start(run(TARGET.text))
    if mounted:
        await started
    else:
        with pytest.raises(faults.AgentTimedOut):
            await started
    if restarted:
        await sandboxes.close()
        sandboxes = daemon(tmp_path, world)
        await sandboxes.adopt_all()
    assert world.images
    await sandboxes.stop(ONE)
    assert (world.images, world.taken) == ({}, {})


async def killed_at(step: str, tmp_path: Path, world: World) -> None:
    """A daemon that is killed at a step of its use of an image: nothing that it would do afterwards happens."""
    world.records[TARGET.text] = a_record(source=IMAGE)
    sandboxes = daemon(tmp_path, world)
    gate = world.gates[step] = Gate()
    running = asyncio.create_task((await sandboxes.get(ONE)).start(run(TARGET.text)))
    await until(gate.entered)
    await sandboxes.close()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    del world.gates[step]


STEPS = ["hold", "note", "take", "attach", "record", "limit", "mount", "grow"]


@pytest.mark.spec("H-52")
@pytest.mark.parametrize("step", STEPS)
async def test_next_daemon_gives_back_volumes_of_vm_ended_meanwhile(
    tmp_path: Path, world: World, step: str
) -> None:
    await killed_at(step, tmp_path, world)
    (body,) = world.bodies.values()
    body.ended.set()
    world.bodies.clear()
    if TARGET in world.claims:
        world.claims[TARGET].ours = False  # the killed daemon's copies are closed
    successor = daemon(tmp_path, world)
    await successor.adopt_all()
    await successor.give_back_left()
    assert (world.images, world.taken) == ({}, {})
    assert not world.is_locked(TARGET)


@pytest.mark.spec("H-52")
@pytest.mark.parametrize("step", ["take", "attach", "record", "limit", "mount", "grow"])
async def test_image_stays_taken_until_unadoptable_vm_is_killed(
    tmp_path: Path, world: World, step: str
) -> None:
    await killed_at(step, tmp_path, world)
    world.claims[TARGET].ours = False
    world.failures["adopt one"].append(faults.AgentTimedOut("hello", 60))
    successor = daemon(tmp_path, world)
    await successor.adopt_all()
    before = dict(world.images), dict(world.taken)
    await successor.give_back_left()
    assert (world.images, world.taken) == before
    await successor.stop(ONE)
    assert (world.images, world.taken) == ({}, {})


async def test_image_of_running_vm_is_not_given_back_as_left(tmp_path: Path, world: World) -> None:
    world.records[TARGET.text] = a_record(source=IMAGE)
    sandboxes = daemon(tmp_path, world)
    await (await sandboxes.get(ONE)).start(run(TARGET.text))
    await sandboxes.give_back_left()
    assert len(world.images) == len(world.taken) == 1


async def test_image_whose_cluster_is_away_is_given_back_later(
    tmp_path: Path, world: World
) -> None:
    await killed_at("mount", tmp_path, world)
    world.claims[TARGET].ours = False
    world.bodies.clear()
    away = errors.PeerUnavailable("the cluster does not answer")
    world.failures["give back"].append(away)
    successor = daemon(tmp_path, world)
    await successor.adopt_all()
    await successor.give_back_left()
    assert world.taken
    await successor.give_back_left()
    assert (world.images, world.taken) == ({}, {})


async def test_commands_of_two_daemons_have_different_names(tmp_path: Path, world: World) -> None:
    """In a container both have the same pid, and the first one's command may still run."""
    sandboxes = daemon(tmp_path, world)
    await (await sandboxes.get(ONE)).start(run())
    await sandboxes.close()
    successor = daemon(tmp_path, world)
    await successor.adopt_all()
    await successor.all()[0].start(run())
    (body,) = world.bodies.values()
    assert len({spec.name for spec in body.starts}) == 2


async def test_nothing_is_claimed_when_one_source_is_no_deferred_volume(
    tmp_path: Path, world: World
) -> None:
    one = await daemon(tmp_path, world).get(ONE)
    with pytest.raises(sandbox.MountSourceNotDeferred, match="/home"):
        await one.start(run(TARGET.text, "/home"))
    assert world.claims == {}
