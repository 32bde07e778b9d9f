"""Claiming, holding and releasing, also by keepers: they hold a claim for a hypervisor that takes no descriptors."""

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

from crust.host.block import devices, users
from crust_conformance.runtimes.subject import RuntimeUnderTest


async def test_r101_held(s: RuntimeUnderTest) -> None:
    target = await s.volume()
    lock = os.stat(s.proxy.paths(target).claim_lock).st_ino
    await s.started("box-1", target)
    assert s.is_held(target), f"claim.lock is not locked by F_OFD_SETLK; {s.holders_text(target)}"
    assert os.stat(s.proxy.paths(target).claim_lock).st_ino == lock, "claim.lock was replaced"
    with open(s.proxy.paths(target).claim) as file:
        claim = json.load(file)
    s.transcript.append(f"(claim.json: {claim})")
    assert claim.get("schema") == 1, "schema is not 1"
    assert claim.get("sandbox_id") == "box-1", "sandbox_id is not the sandbox"
    assert claim.get("handler") == s.name, "handler is not the registered name"
    assert claim.get("state") == "mounted", "state is not mounted"
    assert {"error", "pid", "claimed_at"} <= claim.keys(), "error, pid or claimed_at is missing"
    pid = claim["pid"]
    assert isinstance(pid, int), "pid is no number"
    assert s.may_answer(pid), f"pid is {pid}, and the runtime has no such process"


async def test_r102_second(s: RuntimeUnderTest) -> None:
    target = await s.running()
    if await s.start("box-2", target) == "ok":
        raise AssertionError(
            "a second sandbox was started: a lock of F_OFD_SETLK belongs to a descriptor that was opened for this "
            f"claim, one of F_SETLK to the whole process, which gets it again; {s.holders_text(target)}"
        )
    claim = s.proxy.claim(target)
    assert claim is not None, "the first sandbox's claim was removed"
    assert claim.sandbox_id == "box-1", "the first sandbox's claim was changed"


async def test_r103_exclusive(s: RuntimeUnderTest) -> None:
    device = await s.formatted()
    await s.started("box-1", s.publish(device))
    assert users.is_held(devices.source(device)), (
        f"another program could open {device} with O_EXCL: the hypervisor, or its keeper, must have "
        "the claimant's own descriptor, which was opened with O_EXCL"
    )


async def test_r104_released(s: RuntimeUnderTest) -> None:
    target = await s.running()
    await s.stop("box-1")
    assert not s.is_held(target), f"claim.lock is still locked; {s.holders_text(target)}"
    assert not _content(s, target), "claim.json is left"
    await s.started("box-2", target)


async def test_r105_killed_machine(s: RuntimeUnderTest) -> None:
    target = await s.running()
    await s.kill_machine(target)
    assert not s.is_held(target), (
        f"the lock is held although the virtual machine was killed; {s.holders_text(target)}: "
        "no process that outlives it may have a copy"
    )


async def test_r106_killed_runtime(s: RuntimeUnderTest) -> None:
    target = await s.running()
    await s.kill()
    is_held, holders = s.is_held(target), s.holders_text(target)
    await s.kill_machine(target)
    await s.restart()
    assert is_held, (
        f"the lock was free when the runtime's process had ended; {holders}: the hypervisor, or its keeper, must "
        "have a copy of the locked descriptor"
    )


async def test_r107_dead_claim(s: RuntimeUnderTest) -> None:
    target = await s.running()
    await s.kill_machine(target)
    await s.started("box-2", target)
    claim = s.proxy.claim(target)
    assert claim is not None, "there is no claim.json"
    assert (claim.live, claim.sandbox_id) == (True, "box-2"), "claim.json names another"


async def test_r108_readers(s: RuntimeUnderTest) -> None:
    device = await s.formatted()
    first, second = (s.publish(device, name, readonly=True) for name in ("one", "two"))
    await s.started("box-1", first)
    await s.started("box-2", second)
    assert all(map(s.is_held, (first, second))), "one of the two has no claim"


async def test_r109_failed_start(s: RuntimeUnderTest) -> None:
    target = s.publish(s.device())  # blank: no kernel can mount it
    await s.refused("box-1", target)
    assert not s.is_held(target), "the lock is still held"


async def test_r110_one_killed(s: RuntimeUnderTest) -> None:
    target = await s.running()
    for pid in (await s.keepers(target))[:2]:
        s.transcript.append(f"(SIGKILL to process {pid} of the keeper)")
        await s.kill_processes([pid])
        assert s.is_held(target), f"the lock is free after the end of process {pid} alone"
        keepers = await s.keepers(target)
        assert pid not in keepers, "the other process of the keeper has not replaced it"


async def test_r111_signals(s: RuntimeUnderTest) -> None:
    target = await s.running()
    keepers = await s.keepers(target)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        s.transcript.append(f"({number.name} to the keeper)")
        for pid in keepers:
            os.kill(pid, number)
    assert not await s.ended(keepers, within_s=1.0), "a process of the keeper has ended"
    assert s.is_held(target), "the lock is free"


async def test_r112_session(s: RuntimeUnderTest) -> None:
    target = await s.running()
    for pid in await s.keepers(target):
        assert os.getsid(pid) != s.session, f"process {pid} is in the session of the runtime"


async def test_r113_all_killed(s: RuntimeUnderTest) -> None:
    target = await s.running()
    keepers, machine = await s.keepers(target), s.claimed_pid(target)
    for pid in keepers:
        os.kill(pid, signal.SIGSTOP)  # so that no process replaces a killed one
    s.transcript.append(f"(SIGKILL to all processes of the keeper: {keepers})")
    await s.kill_processes(keepers)
    if not await s.claimed_again_or_ended(target, machine):
        raise AssertionError("no live claim names a sandbox, and the hypervisor lives")
    claim = s.proxy.claim(target)
    if claim is not None and claim.live:
        assert claim.sandbox_id == "box-1", "claim.json names another sandbox"


async def test_r114_orphaned_writer(s: RuntimeUnderTest) -> None:
    target = await s.volume()
    machine = await asyncio.create_subprocess_exec("sleep", "inf")
    try:
        written = s.leave_claim(target, machine.pid)
        await s.refused("box-1", target)
        assert _content(s, target) == written, "claim.json was changed"
        assert not s.is_held(target), f"claim.lock is held; {s.holders_text(target)}"
    finally:
        machine.kill()
        await machine.wait()
    s.transcript.append(f"(process {machine.pid} has ended)")
    await s.started("box-1", target)


async def test_r115_refused_claim(s: RuntimeUnderTest) -> None:
    target = s.publish(await s.formatted(), handler=f"not-{s.name}"[:63])
    written = s.leave_claim(target)
    await s.refused("box-1", target)
    assert _content(s, target) == written, "claim.json of the dead claim is gone, or was changed"


def _content(s: RuntimeUnderTest, target: str) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return Path(s.proxy.paths(target).claim).read_bytes()
    return b""
