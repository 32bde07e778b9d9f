"""Claims a volume for a sandbox, so that nobody else can use it, for exactly as long as the sandbox lives.

    claim_volume   lock the entry, read the record, open the device, check its identity, write claim.json; or fail and
                   leave everything as it was
    claim.fds      pass these descriptors to the hypervisor (`pass_fds`; QMP `add-fd` if it runs already), or to its
                   keeper (`keepers`) if it takes none
    report         write the claim's state: mounted, or an error
    hand_over      close the handler's copies: then the claim lives as long as the hypervisor
    release        after the sandbox has ended, or when it has given the device back

A sandbox claims a volume once, for all of its containers; the runtime counts them. A restarted handler adopts the
claims of the virtual machines that it finds running: it copies the lock's descriptor out of the process that holds
it, so that the claim cannot end, and another sandbox's begin, while it writes claim.json. Functions block.

A kubelet passes fsGroup only to drivers with VOLUME_MOUNT_GROUP. For other drivers it changes the group of the target
directory, which is the root of the guard mount here. This module reads that group and puts it into the record, so
that the guest applies it to the files.
"""

import asyncio
import contextlib
import dataclasses
import datetime
import os
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import Self

from crust import credentials, errors, logs, traces, volumes
from crust.handoff import claims, layout, store
from crust.handoff.record import Record
from crust.host.mounts import mount_api, mountinfo
from crust.host.process import oserrors
from crust.runtime_handler import claimed_device, needs


class WrongHandler(errors.NotReady):
    """The volume is published to another runtime handler."""

    def __init__(self, record: Record, handler: str) -> None:
        super().__init__(
            f"the volume at {record.target} cannot be used by {handler}",
            why=f"it is published to {record.handler}",
            hint="start the pod with that runtime, or correct crust.dev/runtime-handler",
        )
        self.record = record
        self.handler = handler


class ClaimLost(errors.NotReady):
    """The sandbox does not have the volume's claim, or has it no longer."""

    def __init__(self, target: volumes.TargetPath, sandbox_id: str, why: str) -> None:
        super().__init__(
            f"sandbox {sandbox_id} has no claim on the volume at {target}",
            why=why,
            hint="treat the sandbox as ended, and claim the volume again for a new one",
        )
        self.target = target
        self.sandbox_id = sandbox_id


class Claim:
    """The claim of one sandbox on one volume.

    `record` is the record at the time of the claim or adoption, with the group that a CO gave to the guard mount.
    """

    def __init__(
        self,
        paths: layout.EntryPaths,
        record: Record,
        sandbox_id: volumes.SandboxId,
        *,
        lock: claims.ClaimLock | None = None,
        device_fd: int = -1,
        claimed_at: datetime.datetime | None = None,
    ) -> None:
        self.record = record
        self.sandbox_id = sandbox_id
        self._paths = paths
        self._lock = lock
        self._device_fd = device_fd
        self._claimed_at = claimed_at or datetime.datetime.now(datetime.UTC)

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors for the hypervisor: the lock's and, unless it is an image, the device's.

        Empty after `hand_over`.

        They are closed on exec, so that no other child keeps the claim alive; `pass_fds` overrides this for one
        child.
        """
        lock_fd = self._lock.fd if self._lock is not None else -1
        return tuple(fd for fd in (lock_fd, self._device_fd) if fd >= 0)

    async def mounted(self, grow: Callable[[], Awaitable[object]]) -> None:
        """The sandbox has mounted the volume: grow its filesystem to its device, then write that into claim.json.

        `grow` is called unless the volume is read-only: a device grows while nobody has it mounted, and a clone can
        be larger than its source (H-48). It does nothing to a filesystem that fills its device. Raises `ClaimLost` as
        `report_error` does, and what `grow` raises; then the state is not written.
        """
        if not self.record.readonly:
            await grow()
        await asyncio.to_thread(self._report, claims.State.MOUNTED)

    def report_error(self, error: str) -> None:
        """Write into claim.json why the sandbox cannot use the volume, for people.

        Raises `ClaimLost` after `hand_over`: adopt the claim again first.
        """
        self._report(claims.State.ERROR, error)

    def _report(self, state: claims.State, error: str = "") -> None:
        if self._lock is None:
            why = "the lock is handed over, so the claim may have ended and another have begun"
            raise ClaimLost(self.record.target, self.sandbox_id, why)
        claims.write(self._paths, self._content(state, error))

    def hold_device(self) -> None:
        """Open the device again, for an adopted claim whose keeper has ended since (H-46); idempotent.

        The lock was never free, so nobody else can have claimed the volume. Raises `DeviceChanged`, `DeviceInUse`,
        and `ClaimLost` after `hand_over`.
        """
        if self._lock is None:
            raise ClaimLost(self.record.target, self.sandbox_id, "the lock is handed over")
        if self._device_fd < 0:
            self._device_fd = claimed_device.hold(self.record)

    def hand_over(self) -> None:
        """Close this process's copies of the descriptors. The hypervisor has its own; the claim ends when it ends.

        The device first: the lock says that somebody may use it. If these are the last copies, because the hypervisor
        has ended or never had any, whoever finds the lock free must find the device free too.
        """
        device_fd, self._device_fd = self._device_fd, -1
        lock, self._lock = self._lock, None
        try:
            if device_fd >= 0:
                os.close(device_fd)
        finally:
            if lock is not None:
                lock.close()

    def release(self, *, error: str = "") -> None:
        """Remove claim.json, then close device and lock. Only after the sandbox has given the device back or ended.

        With `error`, the reason why the sandbox could not use the volume, claim.json stays with it: `crust volumes`
        shows it until the next claim. It must hold no secret. Idempotent. After `hand_over` it raises
        `HeldBySandbox` while the hypervisor still runs.
        """
        last = self._content(claims.State.ERROR, error) if error else None
        if self._lock is None:
            _end_dead(self._paths, self.record.target, last)
            return
        try:
            if last is not None:
                claims.write(self._paths, last)
            else:
                claims.remove(self._paths)
        finally:  # if claim.json could not be removed, it is a dead claim without the lock
            self.hand_over()
        with contextlib.suppress(errors.NotFound):  # already unpublished
            claims.touch(self._paths)  # the lock's end alone is seen by nobody

    def _content(self, state: claims.State, error: str) -> claims.Claim:
        return claims.Claim(
            sandbox_id=self.sandbox_id,
            handler=self.record.handler,
            state=state,
            error=error,
            pid=os.getpid(),
            claimed_at=self._claimed_at,
            live=True,
            request_id=self.record.published_by.request_id,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.release(error=_reason(error))


@contextlib.contextmanager
def of_publish(record: Record, name: str) -> Iterator[None]:
    """Work of a runtime for a published volume, while the block runs.

    Log lines and calls to the proxy have the request id of the publish, and, if this process traces, a span `name`
    belongs to its trace.
    """
    fields = {
        "driver": record.key.driver,
        "volume_id": record.key.volume_id,
        "target": record.target.text,
    }
    if record.published_by.request_id:
        fields["request_id"] = record.published_by.request_id
    attributes = {f"crust.{key}": credentials.hidden(value) for key, value in fields.items()}
    around = logs.context.set(fields)
    try:
        with traces.span(name, attributes, parent=record.published_by.traceparent):
            yield
    finally:
        logs.context.reset(around)


def claim_volume(
    root: str,
    target: volumes.TargetPath,
    sandbox_id: volumes.SandboxId,
    handler: volumes.HandlerName,
    *,
    features: Collection[volumes.HandlerFeature] = frozenset(),
) -> Claim:
    """Claim the volume that is published at `target`, or raise and change nothing.

    `features` are those of the runtime's RegisterRequest: a volume that needs another one is refused. Raises
    `FeatureMissing`, `claims.NotPublished`, `claims.HeldBySandbox`, `WrongHandler`, `DeviceChanged`,
    `devices.DeviceInUse`, and the record's own error if it cannot be read.
    """
    paths = layout.Layout(root).entry(target)
    undo: list[Callable[[], None]] = []
    try:
        lock = claims.ClaimLock.acquire(paths, target)
        undo.append(lock.release)
        record = _record(root, target)
        with of_publish(record, "ClaimVolume"):
            if record.handler != handler:
                raise WrongHandler(record, handler)
            needs.check(record, features)
            device_fd = claimed_device.hold(record)
            if device_fd >= 0:
                undo.append(lambda: os.close(device_fd))
            claim = Claim(paths, record, sandbox_id, lock=lock, device_fd=device_fd)
            claim._report(claims.State.CLAIMED)
    except BaseException:
        for step in reversed(undo):
            step()
        raise
    return claim


def reclaim_volume(
    root: str,
    target: volumes.TargetPath,
    sandbox_id: volumes.SandboxId,
    handler: volumes.HandlerName,
) -> Claim:
    """Claim the volume again for a sandbox that lives, whose claim ended because its keeper was killed (H-46).

    claim.json proves that nobody had the volume in between: every claimant removes or replaces it, and an entry that
    was published again has none. Raises `ClaimLost` if it does not name that sandbox, and what `claim_volume` raises;
    then the sandbox must be killed, and nothing has changed.
    """
    paths = layout.Layout(root).entry(target)
    lock = claims.ClaimLock.acquire(paths, target, keep_claim=True)
    device_fd = -1
    try:
        found = claims.read(paths)
        if found is None or (found.sandbox_id, found.handler) != (sandbox_id, handler):
            had_it = (
                f"sandbox {found.sandbox_id}" if found and found.sandbox_id else "somebody else"
            )
            raise ClaimLost(target, sandbox_id, f"{had_it} had the volume since then")
        record = _record(root, target)
        if record.handler != handler:
            raise WrongHandler(record, handler)
        device_fd = claimed_device.hold(record)
        claim = Claim(
            paths, record, sandbox_id, lock=lock, device_fd=device_fd, claimed_at=found.claimed_at
        )
        claim._report(found.state, found.error)
    except BaseException:
        if device_fd >= 0:
            os.close(device_fd)
        lock.release()
        raise
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
    copy of the lock's descriptor until `hand_over`. Raises `ClaimLost` if that process does not hold the lock or
    claim.json names another sandbox, `claims.NotPublished`, `WrongHandler`, and the record's own error.
    """
    paths = layout.Layout(root).entry(target)
    record = _record(root, target)
    if record.handler != handler:
        raise WrongHandler(record, handler)
    lock = claims.ClaimLock.of_holder(paths, holder_pid)
    if lock is None:
        why = f"process {holder_pid} does not hold the lock: it has ended, or never had it"
        raise ClaimLost(target, sandbox_id, why)
    try:
        found = claims.read(paths)
        if found is None or found.sandbox_id != sandbox_id:
            named = (found and found.sandbox_id) or "(not named)"
            raise ClaimLost(target, sandbox_id, f"sandbox {named} has it")
    except BaseException:
        lock.close()  # not release: that would end the holder's claim
        raise
    return Claim(paths, record, sandbox_id, lock=lock, claimed_at=found.claimed_at)


def _record(root: str, target: volumes.TargetPath) -> Record:
    entry = store.Store(root).read(target)
    if entry is None:
        raise claims.NotPublished(target)
    return _with_group_of_guard(entry.require())


def _with_group_of_guard(record: Record) -> Record:
    """The record's own group has priority. The files of a read-only volume must not be changed (H-12)."""
    target = record.target.text
    guard = mountinfo.at(target)
    if record.mount.group is not None or record.readonly or guard is None:
        return record
    if not mount_api.is_guard(guard):
        return record
    with oserrors.translating(f"cannot look at {target}"):
        gid = os.stat(target, follow_symlinks=False).st_gid
    if gid == 0:  # the group that it was created with
        return record
    group = volumes.GroupChange(gid)  # a kubelet does not report its policy
    return dataclasses.replace(record, mount=dataclasses.replace(record.mount, group=group))


def _reason(error: BaseException | None) -> str:
    """What people may read of an exception. One that is not of crust may hold anything, a passphrase too."""
    if error is None:
        return ""
    return error.shown() if isinstance(error, errors.CrustError) else type(error).__name__


def _end_dead(
    paths: layout.EntryPaths, target: volumes.TargetPath, last: claims.Claim | None
) -> None:
    """Remove the claim of a hypervisor that has ended, or leave its error; `HeldBySandbox` if it still runs."""
    with contextlib.suppress(errors.NotFound):  # already unpublished: nothing is left to remove
        # taking the lock removes a dead claim
        with claims.ClaimLock.acquire(paths, target):
            if last is not None:
                claims.write(paths, last)
        claims.touch(paths)
