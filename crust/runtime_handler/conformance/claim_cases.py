"""Claiming, holding and releasing."""

import errno
import json
import os

from crust import volumes
from crust.runtime_handler.conformance.case import case, expect
from crust.runtime_handler.conformance.subject import Subject

Feature = volumes.HandlerFeature


@case(
    "R-101",
    "a sandbox that has started holds the claim's lock, and claim.json names it",
    "H-21",
    "H-24",
)
async def held(s: Subject) -> None:
    target = await s.volume()
    lock = os.stat(s.proxy.paths(target).claim_lock).st_ino
    await s.started("box-1", target)
    expect(s.is_held(target), "claim.lock is not locked")
    expect(os.stat(s.proxy.paths(target).claim_lock).st_ino == lock, "claim.lock was replaced")
    with open(s.proxy.paths(target).claim) as file:
        found = json.load(file)
    s.transcript.append(f"(claim.json: {found})")
    expect(found.get("schema") == 1, "schema is not 1")
    expect(found.get("sandbox_id") == "box-1", "sandbox_id is not the sandbox")
    expect(found.get("handler") == s.name, "handler is not the registered name")
    expect(found.get("state") == "mounted", "state is not mounted")
    expect({"error", "pid", "claimed_at"} <= found.keys(), "error, pid or claimed_at is missing")


@case("R-102", "a second sandbox is refused while the first has the volume", "H-21", "H-23")
async def second(s: Subject) -> None:
    target = await s.volume()
    await s.started("box-1", target)
    await s.refused("box-2", target)
    claim = s.proxy.claim(target)
    expect(claim and claim.sandbox_id == "box-1", "the first sandbox's claim was changed")


@case("R-103", "the device is held exclusively while the sandbox has it", "H-28")
async def exclusive(s: Subject) -> None:
    device = await s.formatted()
    await s.started("box-1", s.publish(device))
    try:
        os.close(os.open(device, os.O_RDONLY | os.O_EXCL))
    except OSError as error:
        expect(error.errno == errno.EBUSY, f"open(O_EXCL) failed with {error.strerror}")
    else:
        expect(condition=False, otherwise="another program could open the device with O_EXCL")


@case("R-104", "after the stop claim.json is removed and the lock is free", "H-29")
async def released(s: Subject) -> None:
    target = await s.volume()
    await s.started("box-1", target)
    await s.stop("box-1")
    expect(s.proxy.claim(target) is None, "claim.json is left, or the lock is held")
    await s.started("box-2", target)


@case("R-105", "the claim ends with the virtual machine that is killed", "H-25")
async def killed_machine(s: Subject) -> None:
    target = await s.volume()
    await s.started("box-1", target)
    await s.kill_holders(target)
    expect(not s.is_held(target), "the lock is held although the virtual machine was killed")


@case("R-106", "the claim lives on when the runtime's own process is killed", "H-25")
async def killed_runtime(s: Subject) -> None:
    target = await s.volume()
    await s.started("box-1", target)
    await s.kill()
    is_held = s.is_held(target)
    await s.kill_holders(target)
    await s.proxy.lost(s.name)
    await s.serve()
    expect(is_held, "the lock was free although the virtual machine lives")


@case("R-107", "the claim.json of a dead claim is replaced", "H-22", "H-26")
async def dead_claim(s: Subject) -> None:
    target = await s.volume()
    await s.started("box-1", target)
    await s.kill_holders(target)
    await s.started("box-2", target)
    claim = s.proxy.claim(target)
    expect(claim and claim.live and claim.sandbox_id == "box-2", "claim.json names another")


@case("R-108", "two sandboxes share a read-only volume", "H-28", needs=Feature.READ_ONLY)
async def readers(s: Subject) -> None:
    device = await s.formatted()
    one, two = (s.publish(device, name, readonly=True) for name in ("one", "two"))
    await s.started("box-1", one)
    await s.started("box-2", two)
    expect(s.is_held(one) and s.is_held(two), "one of the two has no claim")


@case("R-109", "what the runtime could not start leaves no live claim", "H-29")
async def failed_start(s: Subject) -> None:
    target = s.publish(s.device())  # blank: no kernel can mount it
    await s.refused("box-1", target)
    expect(not s.is_held(target), "the lock is still held")
