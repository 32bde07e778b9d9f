"""Keepers: the processes that hold a claim in the place of a hypervisor that takes no descriptors."""

import os
import signal

from crust.conformance.runtimes.subject import Subject


async def test_r110_one_killed(s: Subject) -> None:
    target = await s.volume()
    await s.started("box-1", target)
    for pid in (await s.keepers(target))[:2]:
        s.transcript.append(f"(SIGKILL to process {pid} of the keeper)")
        await s.kill_processes([pid])
        assert s.is_held(target), f"the lock is free after the end of process {pid} alone"
        again = await s.keepers(target)
        assert pid not in again, "the other process of the keeper has not replaced it"


async def test_r111_signals(s: Subject) -> None:
    target = await s.volume()
    await s.started("box-1", target)
    found = await s.keepers(target)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        s.transcript.append(f"({number.name} to the keeper)")
        for pid in found:
            os.kill(pid, number)
    assert not await s.ended(found, within_s=1.0), "a process of the keeper has ended"
    assert s.is_held(target), "the lock is free"


async def test_r112_session(s: Subject) -> None:
    target = await s.volume()
    await s.started("box-1", target)
    for pid in await s.keepers(target):
        assert os.getsid(pid) != s.session, f"process {pid} is in the session of the runtime"


async def test_r113_all_killed(s: Subject) -> None:
    target = await s.volume()
    await s.started("box-1", target)
    found = await s.keepers(target)
    for pid in found:
        os.kill(pid, signal.SIGSTOP)  # none of them replaces another before it is killed
    s.transcript.append(f"(SIGKILL to all processes of the keeper: {found})")
    await s.kill_processes(found)
    if not await s.claimed_again_or_ended(target):
        raise AssertionError("the lock is free, and the hypervisor lives")
    claim = s.proxy.claim(target)
    if claim is not None and claim.live:
        assert claim.sandbox_id == "box-1", "claim.json names another sandbox"
