"""A sandbox's claim on a volume: nobody else can use the volume, for exactly as long as the sandbox lives.

A sandbox claims a volume once (`take_claim`), for all of its containers; the runtime counts them. A restarted handler
adopts the claims of the virtual machines that it finds running: it copies the lock's descriptor out of the process
that holds it, so that the claim cannot end, and another sandbox's begin, while it writes claim.json.

The device's descriptor is an exclusive hold: opened with O_EXCL it makes a mount or mkfs on the host fail, while the
hypervisor's plain open works. So only a runtime whose guest mounts the volume can use a claim: mount(2) on the host
is EBUSY for the claimant too. Sandboxes may share read-only volumes, and a second O_EXCL open would fail, so a claim
checks such a device once, as a publish does (crust/host/block/users.py), and opens it without O_EXCL; the proxy's
device reservation does the rest. A claim needs to see the open files of all processes (CAP_SYS_PTRACE, the host's PID
namespace): a virtual machine that lost its runtime has the device open plainly.
"""

import contextlib
import datetime
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Self

from crust.core import credentials, errors, logs, traces, volumes
from crust.handoff import claims, layout
from crust.handoff.record import Record
from crust.host import answers
from crust.host.block import devices, users
from crust.host.block.users import Purpose
from crust.host.process import open_files, processes, syscalls
from crust.host.process.processes import Process


class ClaimLost(errors.NotReady):
    def __init__(self, target: volumes.TargetPath, sandbox_id: str, why: str) -> None:
        super().__init__(f"sandbox {sandbox_id} has no claim on the volume at {target}", why=why)
        self.target = target
        self.sandbox_id = sandbox_id


class ClaimedSince(ClaimLost):
    def __init__(self, target: volumes.TargetPath, sandbox_id: str, by: str) -> None:
        super().__init__(target, sandbox_id, f"{by} has claimed the volume since then")


class NotHandedOver(errors.NotReady):
    def __init__(self, target: volumes.TargetPath, pids: Sequence[int]) -> None:
        named = ", ".join(map(str, pids))
        super().__init__(
            f"the claim on the volume at {target} is not handed over",
            why=f"no process of these has the descriptor of its lock: {named}",
        )


class Claim:
    """The claim of one sandbox on one volume.

    `process` is the hypervisor's; None if it is not known. Without it this process answers for the sandbox (H-24).
    `record` is the record at the time of the claim or adoption, with the group that a CO gave to the guard mount.
    """

    def __init__(  # noqa: PLR0913 - the parts of a claim
        self,
        paths: layout.EntryPaths,
        record: Record,
        sandbox_id: volumes.SandboxId,
        *,
        lock: claims.ClaimLock | None = None,
        device_fd: int = -1,
        claimed_at: datetime.datetime | None = None,
        process: Process | None = None,
    ) -> None:
        self.record = record
        self.sandbox_id = sandbox_id
        self._paths = paths
        self._lock = lock
        self._device_fd = device_fd
        self._process = process
        self._claimed_at = claimed_at or datetime.datetime.now(datetime.UTC)

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors for the hypervisor: the lock's and, unless it is an image, the device's.

        Pass them by `pass_fds`, by QMP `add-fd` if it runs already, or to its keeper (`keepers`) if it takes none.
        They are closed on exec, so that no other child keeps the claim alive. Empty after `hand_over` and `close`.
        """
        lock_fd = self._lock.fd if self._lock is not None else -1
        return tuple(fd for fd in (lock_fd, self._device_fd) if fd >= 0)

    def report_mounted(self, process: Process | None = None) -> None:
        """Write into claim.json that the sandbox has mounted the volume, and which hypervisor it has (H-24).

        The guest has grown a filesystem that it writes to its device by then (H-48). `process` is the hypervisor's,
        if it was started after the claim.

        Raises `ClaimLost` after `hand_over`, and if the claim names another process already.
        """
        if process is not None and self._process not in (None, process):
            why = (
                f"the claim names process {self._process.pid} of it, and not process {process.pid}"
            )
            raise ClaimLost(self.record.target, self.sandbox_id, why)
        self._process = process or self._process
        self.report(claims.State.MOUNTED)

    def report_error(self, error: str) -> None:
        """Write into claim.json why the sandbox cannot use the volume, for people.

        Raises `ClaimLost` after `hand_over`: adopt the claim again first.
        """
        self.report(claims.State.ERROR, error)

    def report(self, state: claims.State, error: str = "") -> None:
        """Write the claim's state into claim.json. Raises `ClaimLost` after `hand_over`."""
        if self._lock is None:
            why = "the lock is handed over, so the claim may have ended and another have begun"
            raise ClaimLost(self.record.target, self.sandbox_id, why)
        claims.write(self._paths, self._content(state, error, process=self._process))

    def hold_device(self, its_vm: int) -> None:
        """Open the device again, for an adopted claim whose keeper has ended since (H-46); idempotent.

        `its_vm` is the virtual machine, which has the device open. The lock was never free, so nobody else can have
        claimed the volume. Raises `DeviceChanged`, `DeviceInUse`, and `ClaimLost` after `hand_over`.
        """
        if self._lock is None:
            raise ClaimLost(self.record.target, self.sandbox_id, "the lock is handed over")
        if self._device_fd < 0:
            self._device_fd = hold_device(self.record, its_vm=its_vm)

    def hand_over(self, to: int, *or_to: int) -> None:
        """Close this process's copies, after a check that one of these processes has the lock's descriptor.

        They are the hypervisor, or its keeper and the standby (`*keeper.pids`): the claim ends when they end. A
        second sandbox would get the volume of a hypervisor that has no descriptor. Raises `NotHandedOver`, and
        `NotSeen`; then this process has the claim. After `hand_over` it does nothing.
        """
        hand_over_claims((self,), to, *or_to)

    def close(self) -> None:
        """Close this process's copies of the descriptors; claim.json stays. Idempotent.

        For an adopted claim, whose holder has its own, and for a sandbox that has ended. The device is closed first:
        the lock says that somebody may use it. If these are the last copies, a process that finds the lock free must
        find the device free too.
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
        shows it until the next claim. It must hold no secret. Idempotent. After `hand_over` or `close` it raises
        `HeldBySandbox` while the hypervisor still runs, and `NotSeen`.
        """
        last = self._content(claims.State.ERROR, error, process=None) if error else None
        if self._lock is None:
            # already unpublished: nothing is left to remove
            with contextlib.suppress(errors.NotFound):
                with claims.ClaimLock.acquire(self._paths, self.record.target) as lock:
                    lock.check_ended(self.record.target)
                    if last is not None:
                        claims.write(self._paths, last)
                    lock.settle()
                claims.touch(self._paths)
            return
        try:
            if last is not None:
                claims.write(self._paths, last)
            else:
                claims.remove(self._paths)
        except errors.Exhausted:  # no space for the reason: the volume is given back nevertheless
            claims.remove(self._paths)
            raise
        finally:  # if claim.json could not be removed, it is a dead claim without the lock
            self.close()
        with contextlib.suppress(errors.NotFound):  # already unpublished
            claims.touch(self._paths)  # no watch sees the lock's end alone

    def _content(self, state: claims.State, error: str, *, process: Process | None) -> claims.Claim:
        """The content of claim.json; without `process` once the sandbox does not have the volume any more (H-29)."""
        return claims.Claim(
            sandbox_id=self.sandbox_id,
            handler=self.record.handler,
            state=state,
            error=error,
            pid=self._process.pid if self._process else os.getpid(),
            claimed_at=self._claimed_at,
            live=True,
            request_id=self.record.crust.request_id or "",
            process=process,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.release(error=reason(error))


def hand_over_claims(claimed: Collection[Claim], *to: int) -> None:
    """As `Claim.hand_over`, for all of them or for none; one list of the descriptors of a process serves them."""
    left = {claim._paths.claim_lock: claim for claim in claimed if claim._lock is not None}
    for pid in to:
        held = open_files.locked(pid, left) if left else set()
        left = {path: claim for path, claim in left.items() if path not in held}
    for lacking in left.values():
        raise NotHandedOver(lacking.record.target, to)
    for claim in claimed:
        claim.close()


def process_of(pid: int) -> Process:
    """The hypervisor of this pid: a child that is not reaped, or a process that the caller has proved to be the VM.

    Raises `errors.NotFound` if it has ended, and `NotSeen`.
    """
    process = answers.seen(processes.of(pid))
    if process is None:
        raise errors.NotFound(f"there is no process {pid}", why="the process has ended")
    return process


def hold_device(
    record: Record, *, its_vm: int = 0, look: Callable[[], users.HostState] = users.look_at_host
) -> int:
    """The descriptor that holds the device; -1 for an image, which has no device on this host.

    `its_vm` is the sandbox's virtual machine, if it may have the device already. `look` is as in `users.check`. The
    claim in the cluster excludes other hosts that would write to the image (specs/handoff.md). The device's identity,
    which does not change while it is open, is checked after the open, and its users: another virtual machine that has
    it open plainly leaves it free by O_EXCL.
    """
    if record.image is not None:
        return -1
    is_reader = record.readonly
    fd = (devices.open_shared if is_reader else devices.open_exclusive)(record.device)
    try:
        identity = devices.identify(record.device)
        with syscalls.translating(f"cannot look at {record.device}"):
            number = os.fstat(fd).st_rdev
        opened = volumes.DeviceIdentity(os.major(number), os.minor(number), identity.disk_sequence)
        if opened != identity or identity != record.identity:
            raise errors.NotReady.named(
                "DeviceChanged",
                f"the volume at {record.target} cannot be used",
                why=f"{record.device} is {opened} now, but {record.identity} was published",
            )
        purpose = Purpose.GUEST_READS if is_reader else Purpose.GUEST_WRITES
        users.check(  # a reader's exclusivity is checked once, and not kept: readers share the device
            record.block,
            purpose,
            but=(its_vm,),
            is_mine=not is_reader,
            look=look,
            published_below=(),
        )
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def publish_context(record: Record, name: str) -> Iterator[None]:
    """Connect the block's work with the publish of the volume.

    Log lines and calls to the proxy get the request id of the publish, and, if this process traces, a span `name`
    belongs to its trace.
    """
    fields = {
        "driver": record.key.driver,
        "volume_id": record.key.volume_id,
        "target": record.target.text,
    }
    if record.crust.request_id:
        fields["request_id"] = record.crust.request_id
    attributes = {f"crust.{key}": credentials.hidden(value) for key, value in fields.items()}
    around = logs.context.set(fields)
    try:
        with traces.span(name, attributes, parent=record.crust.traceparent or ""):
            yield
    finally:
        logs.context.reset(around)


def reason(error: BaseException | None) -> str:
    """The text of an exception for people. An exception of other code may hold anything, even a passphrase."""
    if error is None:
        return ""
    return error.shown() if isinstance(error, errors.CrustError) else type(error).__name__
