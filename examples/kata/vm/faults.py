"""The errors of a VM, its devices and its guest.

The guest is not trusted: its error message is cut and stripped of control characters, and its error code only selects
the class of the error.
"""

from pathlib import Path

from crust.core import errors


class VmAlreadyControlled(errors.NotReady):
    """Another process controls this VM."""

    def __init__(self, directory: Path) -> None:
        super().__init__(
            f"the VM in {directory} is controlled by another process",
            hint="stop that process first; only one may control a VM",
        )


class VmAlreadyRuns(errors.Conflict):
    """A VM runs in this directory already."""

    def __init__(self, directory: Path, pid: int) -> None:
        super().__init__(
            f"a VM runs in {directory} already",
            why=f"process {pid}",
            hint="adopt it, or destroy it",
        )


class InvalidVmDirectory(errors.Refused):
    """The directory cannot be used for a VM."""

    def __init__(self, directory: Path, reason: str) -> None:
        super().__init__(
            f"{directory} cannot be used for a VM",
            why=reason,
            hint="give a short path that only root may write",
        )


class VmGone(errors.PeerUnavailable):
    """The VM has ended, or was never started."""

    def __init__(self, directory: Path, reason: str = "", console: str = "") -> None:
        super().__init__(
            f"the VM in {directory} is gone",
            why=reason,
            hint=f"the end of its console: {console}" if console else "start it again",
        )


class VmStartFailed(errors.RuntimeFailed):
    """QEMU or the guest did not come up."""

    def __init__(self, directory: Path, reason: str, console: str) -> None:
        super().__init__(
            f"the VM in {directory} did not start",
            why=reason,
            hint=f"the end of its console: {console}" if console else "look at QEMU's message",
        )


class QemuCommandFailed(errors.RuntimeFailed):
    """QEMU answered a command with an error, or with a malformed answer."""

    def __init__(self, command: str, reason: str) -> None:
        super().__init__(f"QEMU refused {command}", why=reason)
        self.reason = reason


class QmpDisconnected(errors.PeerUnavailable):
    """QEMU's control socket does not answer."""

    def __init__(self, command: str, reason: str) -> None:
        super().__init__(
            f"QEMU did not answer {command}", why=reason, hint="adopt the VM again, or destroy it"
        )


class NotADisk(errors.InvalidRequest):
    """The source is neither a block device nor a regular file."""

    def __init__(self, source: Path, reason: str) -> None:
        super().__init__(f"{source} cannot be a VM's disk", why=reason)


class InvalidSerial(errors.InvalidRequest):
    """virtio-blk cannot carry this serial number."""

    def __init__(self, serial: str) -> None:
        super().__init__(
            f"{serial!r} cannot be a disk's serial number",
            hint="use 1 to 20 letters, digits, _ or -, and start with a letter or digit",
        )


class SerialInUse(errors.Conflict):
    """The serial number belongs to another disk of this VM."""

    def __init__(self, serial: str, holder: str) -> None:
        super().__init__(f"this VM has another disk {serial}", why=f"it is {holder}")


class DiskNotAttached(errors.NotFound):
    """The VM has no disk of that serial number."""

    def __init__(self, serial: str) -> None:
        super().__init__(f"the VM has no disk {serial}", hint="attach it first")


class DiskInUse(errors.NotReady):
    """Another process, probably another VM, has the disk locked."""

    def __init__(self, source: Path, reason: str) -> None:
        super().__init__(
            f"{source} is in use by another process",
            why=reason,
            hint="stop the other VM; a disk may have one writer at a time",
        )


class DiskNotGrown(errors.NotReady):
    """The device behind a disk has not grown to the requested size."""

    def __init__(self, source: Path, size_bytes: int, wanted_bytes: int) -> None:
        super().__init__(
            f"{source} has {size_bytes} bytes, {wanted_bytes} are wanted",
            hint="grow the device first",
        )


class DiskReadOnly(errors.NotReady):
    """A disk that is attached read-only cannot change its size."""

    def __init__(self, serial: str) -> None:
        super().__init__(
            f"disk {serial} is attached read-only and cannot grow",
            hint="grow it while it is attached for writing, or not attached",
        )


class NoFreeSlot(errors.Exhausted):
    """All hot-plug slots are taken."""

    def __init__(self, slots: int) -> None:
        super().__init__(
            "the VM has no free slot for another disk",
            why=f"it was started with {slots}",
            hint="detach a volume, or start the VM with more volume_slots",
        )


class UnplugTimedOut(errors.NotReady):
    """The guest did not release a disk in time."""

    def __init__(self, serial: str, timeout_s: float) -> None:
        super().__init__(
            f"the guest did not release disk {serial} within {timeout_s:g} s",
            hint="try again; the unplug request is still pending",
        )


class AgentDisconnected(errors.PeerUnavailable):
    """The connection to the agent ended."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            "the guest's agent is not connected",
            why=reason,
            hint="adopt the VM again, or start another",
        )


class AgentTimedOut(errors.PeerUnavailable):
    """The agent did not answer in time; the operation may still complete."""

    def __init__(self, operation: str, timeout_s: float) -> None:
        super().__init__(
            f"the guest did not answer {operation} within {timeout_s:g} s",
            hint="try again: every operation may be repeated",
        )


class GuestProtocolViolation(errors.Refused):
    """The guest sent data that violates the agent protocol; the connection has ended."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            "the guest violated the agent protocol",
            why=reason,
            hint="treat the VM as hostile and stop it",
        )


class OutputTooLarge(errors.Exhausted):
    """A container wrote more than the caller accepts."""

    def __init__(self, container: str, limit_bytes: int) -> None:
        super().__init__(
            f"container {container} wrote more than {limit_bytes} bytes",
            hint="read its output as a stream",
        )


class ContainerTimedOut(errors.NotReady):
    """A container did not end in the time that its caller allowed; it was killed."""

    def __init__(self, container: str, timeout_s: float) -> None:
        super().__init__(
            f"container {container} did not end within {timeout_s:g} s", why="it was killed"
        )


class ShareFailed(errors.RuntimeFailed):
    """The file server of a shared directory did not start."""

    def __init__(self, tag: str, reason: str) -> None:
        super().__init__(f"share {tag} cannot be served", why=reason)


class GuestBadRequest(errors.InvalidRequest):
    """The guest refused the request as malformed."""


class GuestNotFound(errors.NotFound):
    """The guest has no such thing."""


class GuestConflict(errors.Conflict):
    """The guest has it with other properties."""


class GuestBusy(errors.NotReady):
    """It is in use in the guest."""


class GuestUnsupported(errors.Unsupported):
    """The guest cannot do that."""


class GuestRefused(errors.Refused):
    """The guest refused the request."""


class GuestNeedsPassphrase(errors.NotReady):
    """The volume is encrypted, its container is not open, and the request had no passphrase."""


class WrongPassphrase(errors.NotReady):
    """The passphrase does not open the volume's LUKS container."""


class GuestReadOnly(errors.Refused):
    """It is read-only."""


class GuestExhausted(errors.Exhausted):
    """The guest is out of a resource."""


class GuestTimedOut(errors.NotReady):
    """The guest waited for a device or an operation in vain."""


class GuestFilesystemCorrupt(errors.Corrupt):
    """The guest found a damaged filesystem."""


class GuestFailed(errors.RuntimeFailed):
    """The guest failed for another reason."""


_BY_CODE: dict[str, type[errors.CrustError]] = {
    "bad_request": GuestBadRequest,
    "busy": GuestBusy,
    "conflict": GuestConflict,
    "corrupt": GuestFilesystemCorrupt,
    "exhausted": GuestExhausted,
    "not_found": GuestNotFound,
    "passphrase_needed": GuestNeedsPassphrase,
    "passphrase_wrong": WrongPassphrase,
    "read_only": GuestReadOnly,
    "refused": GuestRefused,
    "timeout": GuestTimedOut,
    "unsupported": GuestUnsupported,
}


def of_guest(code: str, message: str, hint: str) -> errors.CrustError:
    """The error for a guest's answer; an unknown code is a GuestFailed."""
    return _BY_CODE.get(code, GuestFailed)(f"guest: {printable(message)}", hint=printable(hint))


def printable(text: str, limit: int = 600) -> str:
    """An untrusted text made safe for a log: one line, no control characters, cut to `limit`."""
    shown = "".join(c if c.isprintable() else " " for c in text[:limit])
    return shown.strip()
