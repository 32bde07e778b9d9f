"""Claiming, holding and releasing."""

import asyncio
import contextlib
import json
import os
from pathlib import Path

from crust.host.block import devices, users
from crust_conformance.runtimes.subject import RuntimeUnderTest


async def test_r101_held(subject: RuntimeUnderTest) -> None:
    target = await subject.volume()
    lock = os.stat(subject.proxy.paths(target).claim_lock).st_ino
    await subject.started("box-1", target)
    assert subject.is_held(target), (
        f"claim.lock is not locked by F_OFD_SETLK; {subject.holders_text(target)}"
    )
    assert os.stat(subject.proxy.paths(target).claim_lock).st_ino == lock, "claim.lock was replaced"
    with open(subject.proxy.paths(target).claim) as file:
        claim = json.load(file)
    subject.transcript.append(f"(claim.json: {claim})")
    assert claim.get("schema") == 1, "schema is not 1"
    assert claim.get("sandbox_id") == "box-1", "sandbox_id is not the sandbox"
    assert claim.get("handler") == subject.name, "handler is not the registered name"
    assert claim.get("state") == "mounted", "state is not mounted"
    for key in ("pid", "claimed_at"):
        assert key in claim, f"{key} is missing"
    pid = claim["pid"]
    assert isinstance(pid, int), "pid is no number"
    assert subject.may_answer(pid), f"pid is {pid}, and the runtime has no such process"


async def test_r102_second(subject: RuntimeUnderTest) -> None:
    target = await subject.running()
    if await subject.start("box-2", target) == "ok":
        raise AssertionError(
            "a second sandbox was started: a lock of F_OFD_SETLK belongs to a descriptor that was opened for this "
            f"claim, one of F_SETLK to the whole process, which gets it again; {subject.holders_text(target)}"
        )
    claim = subject.proxy.claim(target)
    assert claim is not None, "the first sandbox's claim was removed"
    assert claim.sandbox_id == "box-1", "the first sandbox's claim was changed"


async def test_r103_exclusive(subject: RuntimeUnderTest) -> None:
    device = await subject.formatted()
    await subject.started("box-1", subject.publish(device))
    assert users.is_held(devices.source(device)), (
        f"another program could open {device} with O_EXCL: the hypervisor, or its keeper, must have "
        "the claimant's own descriptor, which was opened with O_EXCL"
    )


async def test_r104_released(subject: RuntimeUnderTest) -> None:
    target = await subject.running()
    await subject.stop("box-1")
    assert not subject.is_held(target), (
        f"claim.lock is still locked; {subject.holders_text(target)}"
    )
    assert not _content(subject, target), "claim.json is left"
    await subject.started("box-2", target)


async def test_r124_claimed_by_another(subject: RuntimeUnderTest) -> None:
    target = await subject.running()
    await subject.kill_machine(target)
    with subject.held_by_another(target) as written:
        await subject.send(
            "stop", "box-1"
        )  # the answer does not matter: the clean-up stops it again
        assert _content(subject, target) == written, (
            "claim.json of another sandbox was removed or changed"
        )


async def test_r105_killed_machine(subject: RuntimeUnderTest) -> None:
    target = await subject.running()
    await subject.kill_machine(target)
    assert not subject.is_held(target), (
        f"the lock is held although the virtual machine was killed; {subject.holders_text(target)}: "
        "no process that outlives it may have a copy"
    )


async def test_r106_killed_runtime(subject: RuntimeUnderTest) -> None:
    target = await subject.running()
    await subject.kill()
    is_held, holders = subject.is_held(target), subject.holders_text(target)
    await subject.kill_machine(target)
    await subject.restart()
    assert is_held, (
        f"the lock was free when the runtime's process had ended; {holders}: the hypervisor, or its keeper, must "
        "have a copy of the locked descriptor"
    )


async def test_r107_dead_claim(subject: RuntimeUnderTest) -> None:
    target = await subject.running()
    await subject.kill_machine(target)
    await subject.started("box-2", target)
    claim = subject.proxy.claim(target)
    assert claim is not None, "there is no claim.json"
    assert (claim.live, claim.sandbox_id) == (True, "box-2"), "claim.json names another"


async def test_r108_readers(subject: RuntimeUnderTest) -> None:
    device = await subject.formatted()
    first, second = (subject.publish(device, name, readonly=True) for name in ("one", "two"))
    await subject.started("box-1", first)
    await subject.started("box-2", second)
    assert all(map(subject.is_held, (first, second))), "one of the two has no claim"


async def test_r109_failed_start(subject: RuntimeUnderTest) -> None:
    target = subject.publish(subject.device())  # blank: no kernel can mount it
    await subject.refused("box-1", target)
    assert not subject.is_held(target), "the lock is still held"
    left = json.loads(_content(subject, target) or b"{}")
    assert "process" not in left, "the claim.json that is left names a process"


async def test_r114_orphaned_writer(subject: RuntimeUnderTest) -> None:
    target = await subject.volume()
    machine = await asyncio.create_subprocess_exec("sleep", "inf")
    try:
        written = subject.leave_claim(target, machine.pid)
        await subject.refused("box-1", target)
        assert _content(subject, target) == written, "claim.json was changed"
        assert not subject.is_held(target), f"claim.lock is held; {subject.holders_text(target)}"
    finally:
        machine.kill()
        await machine.wait()
    subject.transcript.append(f"(process {machine.pid} has ended)")
    await subject.started("box-1", target)


async def test_r115_refused_claim(subject: RuntimeUnderTest) -> None:
    target = subject.publish(await subject.formatted(), handler=f"not-{subject.name}"[:63])
    written = subject.leave_claim(target)
    await subject.refused("box-1", target)
    assert _content(subject, target) == written, (
        "claim.json of the dead claim is gone, or was changed"
    )


async def test_r123_unreadable_dead_claim(subject: RuntimeUnderTest) -> None:
    target = await subject.volume()
    paths = subject.proxy.paths(target)
    Path(paths.claim).touch(0o600)
    Path(paths.claim).write_text("{")
    subject.transcript.append("(a dead claim that cannot be read)")
    try:
        await subject.refused("box-1", target)
        assert _content(subject, target) == b"{", "claim.json was changed"
    finally:  # with it the volume could not be unpublished
        for path in (paths.claim, paths.dead_claim):
            Path(path).unlink(missing_ok=True)


def _content(subject: RuntimeUnderTest, target: str) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return Path(subject.proxy.paths(target).claim).read_bytes()
    return b""
