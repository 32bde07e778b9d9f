"""The evidence about a sandbox, whichever of Kata's runtimes made it: its virtual machine, and the devices of that.

A runtime says in files or sockets of its own which process the machine is (`go_runtime`, `rust_runtime`). That is
compared with the kernel: a process is a sandbox's machine if the sandbox's id is in its arguments, its control group,
or its parent's arguments, and a disk is attached if the process has the device open. What a runtime says may name a
user of a device; it never proves that there is none.
"""

import abc
import enum
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from crust.core import errors, volumes
from crust.handoff.record import Record
from crust.host.process import syscalls

_LIMIT_BYTES = 4 * 1024 * 1024


class VmUnknown(errors.NotReady):
    """It cannot be proved which process is the sandbox's virtual machine."""

    def __init__(self, sandbox_id: str, why: str) -> None:
        super().__init__(
            f"the virtual machine of sandbox {sandbox_id} cannot be told",
            why=why,
            hint="retry; if it stays so, delete the pod, and look for its hypervisor by the sandbox's id in `ps`",
        )


class Kind(enum.Enum):
    """Kata's two runtimes."""

    GO = "Go runtime"
    RUST = "runtime-rs"


@dataclass(frozen=True, slots=True)
class Use:
    """The volume's mount in a container that runs. `guest_path` is the mount's in the guest; "": it is not known."""

    sandbox_id: str
    container_id: str = ""
    guest_path: str = ""


@dataclass(frozen=True)
class Runtime(abc.ABC):
    """One of Kata's two; its shims have a directory for each sandbox in `root`. Functions block, but for `stats`."""

    kind: ClassVar[Kind]
    root: str

    def has(self, sandbox_id: str) -> bool:
        """Whether the sandbox is this runtime's."""
        return os.path.isdir(f"{self.root}/{sandbox_id}")

    @abc.abstractmethod
    def vm_of(self, sandbox_id: str, told: int = 0) -> int:
        """The process of the sandbox's virtual machine; `told` is the engine's word, 0 for none. Raises VmUnknown."""

    def check_attachable(  # noqa: B027
        self, sandbox_id: str, pid: int, record: Record, others: int
    ) -> None:
        """Raise if the machine must not be given the volume for a mount that is to be created.

        `others` are mounts of the volume that are created now, too.
        """

    @abc.abstractmethod
    def check_mounted(
        self, sandbox_id: str, pid: int, container_id: str, destination: str, record: Record
    ) -> None:
        """Raise `VolumeNotAttached` unless Kata attached the device and mounts it for this container."""

    def guest_paths(
        self, sandbox_id: str, destinations: Sequence[str], *, just_made: bool
    ) -> list[str]:
        """Where the guest has the mounts of one container; "": not told, or not needed for `stats`."""
        return [""] * len(destinations)

    @abc.abstractmethod
    async def stats(self, record: Record, use: Use) -> volumes.VolumeStats:
        """What the guest's kernel counts. Raises OSError and ValueError."""


class Runtimes:
    """Those of the node. Which one has made a sandbox says its own directory."""

    def __init__(self, each: Sequence[Runtime]) -> None:
        self._each = each

    def of(self, sandbox_id: str) -> Runtime:
        """The runtime of a sandbox. Raises VmUnknown."""
        check_id(sandbox_id)
        for runtime in self._each:
            if runtime.has(sandbox_id):
                return runtime
        raise VmUnknown(sandbox_id, "none of Kata's runtimes has a directory of it")


def not_attached(record: Record, sandbox_id: str, why: str) -> errors.CrustError:
    """The error of a volume that is not where its container would look for it."""
    return errors.NotReady.named(
        "VolumeNotAttached",
        f"the volume at {record.target} is not in the virtual machine of sandbox {sandbox_id}",
        why=why,
        hint="delete the pod; its process was not started",
    )


def has_open(pid: int, record: Record) -> bool:
    """Whether the process has the record's device open now."""
    identity = record.identity
    wanted = os.makedev(identity.major, identity.minor)
    directory = f"/proc/{pid}/fd"
    try:
        names = os.listdir(directory)
    except OSError:
        return False
    return any(_device_at(f"{directory}/{name}") == wanted for name in names)


def _device_at(path: str) -> int | None:
    try:
        return syscalls.block_device_at(path)
    except OSError:  # closed meanwhile
        return None


def check_machine(sandbox_id: str, pid: int, told: int) -> None:
    """Raise VmUnknown unless engine, runtime and kernel agree that the process is the sandbox's machine."""
    if told and told != pid:
        raise VmUnknown(sandbox_id, f"the engine names process {told}, and Kata process {pid}")
    if not pid or not _belongs(pid, sandbox_id):
        raise VmUnknown(sandbox_id, f"process {pid}, which Kata names, is not the sandbox's")


def _belongs(pid: int, sandbox_id: str) -> bool:
    wanted = sandbox_id.encode()
    status = _content(pid, "status")
    parent = next(
        (line.split()[1] for line in status.split(b"\n") if line.startswith(b"PPid:")), b"0"
    )
    said = (_content(pid, "cmdline"), _content(pid, "cgroup"), _content(int(parent), "cmdline"))
    return any(wanted in text for text in said)


def _content(pid: int, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read(_LIMIT_BYTES)
    except OSError:
        return b""


def check_id(text: str) -> None:
    """Raise VmUnknown for a text that is no id: it becomes a part of a path, and must not be in every text."""
    if len(text) < 8 or not text.isascii() or not text.replace("-", "").replace("_", "").isalnum():
        raise VmUnknown(text[:64], "this is not an id of a sandbox or a container")
