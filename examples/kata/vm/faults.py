"""The ways in which a VM, its devices or its guest fail.

The guest is not trusted: what it says of an error is cut, stripped of control characters, and never decides
more than which branch the error belongs to.
"""

from pathlib import Path

from crust import errors


class VmAlreadyControlled(errors.NotReady):
    """Another process controls this VM."""

    def __init__(self, directory: Path) -> None:
        super().__init__(
            f"the VM in {directory} is controlled by another process",
            hint="stop that process first; only one may hold a VM",
        )
        self.directory = directory


class VmAlreadyRuns(errors.Conflict):
    """A VM runs in this directory."""

    def __init__(self, directory: Path, pid: int) -> None:
        super().__init__(
            f"a VM runs in {directory} already",
            why=f"process {pid}",
            hint="adopt it, or destroy it",
        )
        self.directory = directory
        self.pid = pid


class InvalidVmDirectory(errors.Refused):
    """The directory cannot hold the sockets of a VM."""

    def __init__(self, directory: Path, reason: str) -> None:
        super().__init__(
            f"{directory} cannot hold a VM",
            why=reason,
            hint="give a short path that root alone may write",
        )
        self.directory = directory


class VmGone(errors.PeerUnavailable):
    """There is no such VM any more."""

    def __init__(self, directory: Path, reason: str = "", console: str = "") -> None:
        super().__init__(
            f"the VM in {directory} is gone",
            why=reason,
            hint=f"the end of its console: {console}" if console else "start it again",
        )
        self.directory = directory
        self.console = console


class VmStartFailed(errors.RuntimeFailed):
    """QEMU or the guest did not come up."""

    def __init__(self, directory: Path, reason: str, console: str) -> None:
        super().__init__(
            f"the VM in {directory} did not start",
            why=reason,
            hint=f"the end of its console: {console}" if console else "look at QEMU's message",
        )
        self.directory = directory
        self.console = console


class QemuCommandFailed(errors.RuntimeFailed):
    """QEMU answered a command with an error, or with something else than it promises."""

    def __init__(self, command: str, reason: str) -> None:
        super().__init__(f"QEMU refused {command}", why=reason)
        self.command = command
        self.reason = reason


class QmpDisconnected(errors.PeerUnavailable):
    """QEMU's control socket does not answer."""

    def __init__(self, command: str, reason: str) -> None:
        super().__init__(
            f"QEMU did not answer {command}", why=reason, hint="adopt the VM again, or destroy it"
        )
        self.command = command


class NotADisk(errors.InvalidRequest):
    """The source is neither a block device nor a regular file."""

    def __init__(self, source: Path, reason: str) -> None:
        super().__init__(f"{source} cannot be a VM's disk", why=reason)
        self.source = source


class InvalidSerial(errors.InvalidRequest):
    """A serial number that virtio-blk cannot carry."""

    def __init__(self, serial: str) -> None:
        super().__init__(
            f"{serial!r} cannot be a disk's serial number",
            hint="use 1 to 20 letters, digits, _ or -, the first no dash",
        )
        self.serial = serial


class SerialInUse(errors.Conflict):
    """The serial number belongs to another disk of this VM."""

    def __init__(self, serial: str, holder: str) -> None:
        super().__init__(f"disk {serial} of this VM is another one", why=f"it is {holder}")
        self.serial = serial
        self.holder = holder


class DiskNotAttached(errors.NotFound):
    """The VM has no disk of that serial number."""

    def __init__(self, serial: str) -> None:
        super().__init__(f"the VM has no disk {serial}", hint="attach it first")
        self.serial = serial


class DiskInUse(errors.NotReady):
    """Another process has the disk locked, another VM in all likelihood."""

    def __init__(self, source: Path, reason: str) -> None:
        super().__init__(
            f"{source} is in use by another process",
            why=reason,
            hint="stop the other VM; one writer at a time",
        )
        self.source = source


class DiskNotGrown(errors.NotReady):
    """The device behind a disk is smaller than what the guest shall see."""

    def __init__(self, source: Path, size_bytes: int, wanted_bytes: int) -> None:
        super().__init__(
            f"{source} has {size_bytes} bytes, wanted {wanted_bytes}", hint="grow the device first"
        )
        self.source = source
        self.size_bytes = size_bytes
        self.wanted_bytes = wanted_bytes


class DiskReadOnly(errors.NotReady):
    """A disk that the VM has read-only cannot change its size under it."""

    def __init__(self, serial: str) -> None:
        super().__init__(
            f"disk {serial} is attached read-only and cannot grow",
            hint="grow it while it is attached for writing, or detached",
        )
        self.serial = serial


class NoFreeSlot(errors.Exhausted):
    """All hot-plug slots are taken."""

    def __init__(self, slots: int) -> None:
        super().__init__(
            "no slot is free for another disk",
            why=f"the VM was started with {slots}",
            hint="detach a volume, or start the VM with more volume_slots",
        )
        self.slots = slots


class UnplugTimedOut(errors.NotReady):
    """The guest did not release a disk in time."""

    def __init__(self, serial: str, timeout_s: float) -> None:
        super().__init__(
            f"the guest did not release disk {serial} within {timeout_s:g} s",
            hint="try again; the request stands",
        )
        self.serial = serial


class AgentDisconnected(errors.PeerUnavailable):
    """The connection to the agent ended."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            "the guest's agent is not connected",
            why=reason,
            hint="adopt the VM again, or start another",
        )


class AgentTimedOut(errors.PeerUnavailable):
    """The agent did not answer in time; what was asked may still happen."""

    def __init__(self, operation: str, timeout_s: float) -> None:
        super().__init__(
            f"the guest did not answer {operation} within {timeout_s:g} s",
            hint="ask again: every operation may be repeated",
        )
        self.operation = operation


class GuestProtocolViolation(errors.Refused):
    """The guest said something that no agent of ours says; it is not listened to any more."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            "the guest broke the agent protocol",
            why=reason,
            hint="treat the VM as hostile and stop it",
        )


class OutputTooLarge(errors.Exhausted):
    """A container wrote more than the caller wants to hold."""

    def __init__(self, container: str, limit_bytes: int) -> None:
        super().__init__(
            f"container {container} wrote more than {limit_bytes} bytes",
            hint="read its output as a stream",
        )


class ContainerTimedOut(errors.NotReady):
    """A container did not end in the time that its caller gave it; it was killed."""

    def __init__(self, container: str, timeout_s: float) -> None:
        super().__init__(
            f"container {container} did not end within {timeout_s:g} s", why="it was killed"
        )
        self.container = container


class ShareFailed(errors.RuntimeFailed):
    """The file server of a shared directory did not start."""

    def __init__(self, tag: str, reason: str) -> None:
        super().__init__(f"share {tag} cannot be served", why=reason)
        self.tag = tag


class GuestBadRequest(errors.InvalidRequest):
    """The guest refused the request as malformed."""


class GuestNotFound(errors.NotFound):
    """The guest has no such thing."""


class GuestConflict(errors.Conflict):
    """The guest has it, but otherwise."""


class GuestBusy(errors.NotReady):
    """The guest still uses it."""


class GuestUnsupported(errors.Unsupported):
    """The guest cannot do that."""


class GuestRefused(errors.Refused):
    """The guest will not do that."""


class GuestReadOnly(errors.Refused):
    """It is read-only."""


class GuestExhausted(errors.Exhausted):
    """The guest has no room for it."""


class GuestTimedOut(errors.NotReady):
    """What the guest waited for did not come."""


class GuestFilesystemCorrupt(errors.Corrupt):
    """The guest found a damaged filesystem."""


class GuestFailed(errors.RuntimeFailed):
    """The guest failed otherwise."""


_BY_CODE: dict[str, type[errors.CrustError]] = {
    "bad_request": GuestBadRequest,
    "busy": GuestBusy,
    "conflict": GuestConflict,
    "corrupt": GuestFilesystemCorrupt,
    "exhausted": GuestExhausted,
    "not_found": GuestNotFound,
    "read_only": GuestReadOnly,
    "refused": GuestRefused,
    "timeout": GuestTimedOut,
    "unsupported": GuestUnsupported,
}


def of_guest(code: str, message: str, hint: str) -> errors.CrustError:
    """The error for a guest's answer; a code nobody knows is a GuestFailed."""
    return _BY_CODE.get(code, GuestFailed)(f"guest: {printable(message)}", hint=printable(hint))


def printable(text: str, limit: int = 600) -> str:
    """What an untrusted text may look like in a log: one line, no control characters, cut."""
    shown = "".join(c if c.isprintable() else " " for c in text[:limit])
    return shown.strip()
