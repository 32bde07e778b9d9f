"""The ways in which a sandbox gets the claim of a volume: it claims, its restarted handler adopts or reclaims.

A kubelet passes fsGroup only to drivers with VOLUME_MOUNT_GROUP. For other drivers it changes the group of the target
directory, which is the root of the guard mount here. This module reads that group and puts it into the record, so
that the guest applies it to the files.

The runtime must offer every feature that a volume needs. The proxy checks this at the publish. A runtime may have
been restarted with fewer features since, and the guard's group is known only now. Without a check a need is ignored
silently: no limits, files that the pod cannot read, a filesystem that nobody makes.

A free lock does not prove that its hypervisor has ended: its keeper may have been killed. A dead claim that names a
process which runs refuses every claimant but the runtime of that process, and so does no answer.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Collection

from crust.core import errors, volumes
from crust.handoff import claims, layout, store
from crust.handoff.record import Record, needs, unsupported
from crust.host.block import users
from crust.host.mounts import mount_api, mountinfo
from crust.host.process import syscalls
from crust.host.process.processes import Process
from crust.runtime_handler.blocking.claim import (
    Claim,
    ClaimedSince,
    ClaimLost,
    hold_device,
    publish_context,
)


def claim_volume(
    root: str,
    target: volumes.TargetPath,
    sandbox_id: volumes.SandboxId,
    handler: volumes.HandlerName,
    *,
    features: Collection[volumes.HandlerFeature] = frozenset(),
    process: Process | None = None,
) -> Claim:
    """Claim the volume that is published at `target`, or raise and change nothing: a dead claim stays too.

    `process` is the hypervisor's, if it runs already; a claim that a keeper will hold needs it (H-24). `features` are
    the features of the runtime's RegisterRequest: a volume that needs another feature is refused. Raises
    `UnsupportedByHandler`, `GuardMissing`, `claims.NotPublished`, `claims.HeldBySandbox` (`HypervisorLives` without
    the lock), `NotSeen`, `WrongHandler`, `DeviceChanged`, `holders.DeviceInUse`, `DeviceMountedOnHost`,
    `users.WritesInFlight`, and the record's or the dead claim's own error if it cannot be read.
    """
    (claim,) = claim_volumes(
        root, (target,), sandbox_id, handler, features=features, process=process
    )
    return claim


def claim_volumes(
    root: str,
    targets: Collection[volumes.TargetPath],
    sandbox_id: volumes.SandboxId,
    handler: volumes.HandlerName,
    *,
    features: Collection[volumes.HandlerFeature] = frozenset(),
    process: Process | None = None,
) -> list[Claim]:
    """As `claim_volume`, for all volumes of a container or for none.

    One look at all processes and one list of the mounts serve them.
    """
    claimed = []
    with contextlib.ExitStack() as undo:
        locks = [
            undo.enter_context(claims.ClaimLock.acquire(layout.Layout(root).entry(target), target))
            for target in targets
        ]
        # both begin after each of them has its lock
        look, listed = functools.cache(users.look_at_host), functools.cache(mountinfo.listing)
        for target, lock in zip(targets, locks, strict=True):
            record = _record(root, target, handler, listed, must_be_guarded=True)
            with publish_context(record, "ClaimVolume"):
                check_offered(record, features)
                lock.check_ended(target, but=process)
                device_fd = _held_device(record, undo, look=look)
                claim = Claim(
                    lock.paths, record, sandbox_id, lock=lock, device_fd=device_fd, process=process
                )
                claim.report(claims.State.CLAIMED)
                undo.callback(claims.remove, lock.paths)
                claimed.append(claim)
        for lock in locks:
            lock.settle()
        undo.pop_all()
    return claimed


def reclaim_volume(
    root: str,
    target: volumes.TargetPath,
    sandbox_id: volumes.SandboxId,
    handler: volumes.HandlerName,
    process: Process,
) -> Claim:
    """Claim the volume again for a sandbox that lives, whose claim ended because its keeper was killed (H-46).

    `process` is its hypervisor's. claim.json proves that nobody had the volume in between: every claimant replaces
    it, and none gets the volume while the process lives. Raises `ClaimedSince` if it names another sandbox,
    `ClaimLost` if there is none or it names another process, and the errors of `claim_volume`; then nothing has
    changed.
    """
    paths = layout.Layout(root).entry(target)
    with contextlib.ExitStack() as undo:
        lock = undo.enter_context(claims.ClaimLock.acquire(paths, target))
        previous = lock.dead()
        if previous is None:
            why = "the entry has no claim.json: it was published again, or its claim.json is lost"
            raise ClaimLost(target, sandbox_id, why)
        if (previous.sandbox_id, previous.handler) != (sandbox_id, handler):
            raise ClaimedSince(target, sandbox_id, f"sandbox {previous.sandbox_id}")
        if previous.process not in (None, process):
            why = f"claim.json names process {previous.pid} of it, and not process {process.pid}"
            raise ClaimLost(target, sandbox_id, why)
        record = _record(root, target, handler)
        claim = Claim(
            paths,
            record,
            sandbox_id,
            lock=lock,
            device_fd=_held_device(record, undo, its_vm=process.pid),
            claimed_at=previous.claimed_at,
            process=process,
        )
        claim.report(previous.state, previous.error)
        lock.settle()
        undo.pop_all()
    return claim


def adopt_volume(
    root: str,
    target: volumes.TargetPath,
    sandbox_id: volumes.SandboxId,
    handler: volumes.HandlerName,
    holder_pid: int,
) -> Claim:
    """The claim of a sandbox whose hypervisor outlived its handler, for the restarted handler.

    `holder_pid` is the process that holds the claim's descriptors: the hypervisor, or its keeper. This process has a
    copy of the lock's descriptor until `close`; claim.json keeps the hypervisor's process. Raises `ClaimLost` if the
    holder does not hold the lock or claim.json names another sandbox, `claims.NotPublished`, `WrongHandler`, and the
    record's own error.
    """
    (claim,) = adopt_volumes(root, (target,), sandbox_id, handler, holder_pid)
    return claim


def adopt_volumes(
    root: str,
    targets: Collection[volumes.TargetPath],
    sandbox_id: volumes.SandboxId,
    handler: volumes.HandlerName,
    holder_pid: int,
) -> list[Claim]:
    """As `adopt_volume`, for all these volumes or for none.

    One list of the mounts, and one of the holder's descriptors, serve them.
    """
    listed = functools.cache(mountinfo.listing)
    records = [_record(root, target, handler, listed) for target in targets]
    each = [layout.Layout(root).entry(target) for target in targets]
    adopted = []
    with contextlib.ExitStack() as undo:
        locks = claims.ClaimLock.of_holder(each, holder_pid)
        for lock in locks.values():
            undo.callback(lock.close)  # not release: that would end the holder's claim
        for record, paths in zip(records, each, strict=True):
            if paths.digest not in locks:
                why = f"process {holder_pid} does not hold the lock: it has ended, or never had it"
                raise ClaimLost(record.target, sandbox_id, why)
            present = claims.read(paths)
            if present is None or present.sandbox_id != sandbox_id:
                named = (present and present.sandbox_id) or "(not named)"
                raise ClaimLost(record.target, sandbox_id, f"sandbox {named} has it")
            claim = Claim(
                paths,
                record,
                sandbox_id,
                lock=locks[paths.digest],
                claimed_at=present.claimed_at,
                process=present.process,
            )
            adopted.append(claim)
        undo.pop_all()
    return adopted


def check_offered(record: Record, offered: Collection[volumes.HandlerFeature]) -> None:
    """Raise `UnsupportedByHandler` for the first feature that the volume needs and the runtime does not offer."""
    mount = record.mount
    for feature, reason in needs(readonly=mount.readonly, group=mount.group, mount=mount):
        if feature not in offered:
            raise unsupported(record.handler, reason, feature)


def _held_device(
    record: Record,
    undo: contextlib.ExitStack,
    *,
    its_vm: int = 0,
    look: Callable[[], users.HostState] = users.look_at_host,
) -> int:
    device_fd = hold_device(record, its_vm=its_vm, look=look)
    if device_fd >= 0:
        undo.callback(os.close, device_fd)
    return device_fd


def _record(
    root: str,
    target: volumes.TargetPath,
    handler: volumes.HandlerName,
    listed: Callable[[], bytes] | None = None,
    *,
    must_be_guarded: bool = False,
) -> Record:
    """The record of the entry, with the group of the guard. A sandbox that lives has got its group already."""
    record = store.Store(root).find_record(target)
    if record is None:
        raise claims.NotPublished(target)
    if record.handler != handler:
        raise errors.NotReady.named(
            "WrongHandler",
            f"the volume at {record.target} cannot be used by {handler}",
            why=f"it is published to {record.handler}",
        )
    mount = mountinfo.at(record.target.text, listed)
    if mount is None or not mount_api.is_guard(mount):
        if must_be_guarded and record.crust.request is not None:
            raise errors.NotReady.named(
                "GuardMissing",
                f"the volume at {record.target} cannot be claimed",
                why="no guard mount is on top of its target, and the CO gives the pod's fsGroup to the guard",
            )
        return record
    # the record's own group has priority; the files of a read-only volume must not be changed (H-12)
    if record.mount.group is not None or record.readonly:
        return record
    with syscalls.translating(f"cannot look at {record.target}"):
        gid = os.stat(record.target.text, follow_symlinks=False).st_gid
    if gid == 0:  # nobody has changed the group
        return record
    group = volumes.GroupChange(gid)  # a kubelet does not report its policy
    return record.replaced(dataclasses.replace(record.mount, group=group))
