"""The evidence about a sandbox of either of Kata's runtimes: its virtual machine, and the machine's devices.

A runtime names the machine's process in its own files or sockets (`go_runtime`, `rust_runtime`). Crust compares that
with the kernel: a process is a sandbox's machine if the sandbox's id is in its arguments, its control group, or its
parent's arguments, and a disk is attached if the process has the device open. A runtime's files may name a user of a
device; they never prove that a device has no user. A guest's numbers are checked here, too.
"""

import abc
import asyncio
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from crust.core import errors, volumes
from crust.core.printable import printable
from crust.handoff.record import Record
from crust.host import answers
from crust.host.files import listing
from crust.host.process import hidden, syscalls
from crust.wire.kata.v1 import agent_pb2

ANSWER_S = 70.0
"""How long a question to a shim may take: the shim's own limit is a minute."""
_ANSWER_BYTES = 64 * 1024
_USAGES_MAX = 8
_UNITS = {
    agent_pb2.VolumeUsage.BYTES: volumes.UsageUnit.BYTES,
    agent_pb2.VolumeUsage.INODES: volumes.UsageUnit.INODES,
}


class VmUnknown(errors.NotReady):
    def __init__(self, sandbox_id: str, why: str) -> None:
        super().__init__(
            f"the virtual machine of sandbox {sandbox_id} cannot be identified", why=why
        )


class Kind(enum.Enum):
    """Kata's two runtimes."""

    GO = "Go runtime"
    RUST = "runtime-rs"


@dataclass(frozen=True, slots=True)
class Use:
    """The volume's mount in a running container. `guest_path` is its path in the guest; "": it is not known."""

    sandbox_id: str
    container_id: str = ""
    guest_path: str = ""


@dataclass(frozen=True)
class KataBuild(abc.ABC):
    """One of Kata's two builds. `root` has a directory for each sandbox. All but `ask_shim` and `stats` block."""

    kind: ClassVar[Kind]
    root: str

    def has(self, sandbox_id: str) -> bool:
        """Whether the sandbox is this runtime's. Raises `NotSeen`."""
        return listing.is_directory(f"{self.root}/{sandbox_id}")

    @abc.abstractmethod
    def vm_of(self, sandbox_id: str, engine_pid: int = 0) -> int:
        """The process of the sandbox's virtual machine. The engine named `engine_pid`, or 0. Raises VmUnknown."""

    def check_attachable(  # noqa: B027
        self, sandbox_id: str, pid: int, mounts: Sequence[tuple[Record, int]], until_s: float
    ) -> None:
        """Raise if the machine must not get a volume for one more mount, beside the number of those that it has.

        These are created or run. It may wait `until_s`, of time.monotonic(), for the machine to let go of the disks
        of an ended container.
        """

    @abc.abstractmethod
    def check_mounted(
        self, sandbox_id: str, pid: int, container_id: str, mounts: Mapping[str, Record]
    ) -> None:
        """Raise `VolumeNotAttached` unless Kata attached each device and mounts it for this container.

        `mounts` are by their destinations.
        """

    def guest_paths(
        self, sandbox_id: str, destinations: Sequence[str], *, just_made: bool
    ) -> list[str]:
        """The guest's paths of the mounts of one container; "": not known, or not needed for `stats`."""
        return [""] * len(destinations)

    async def ask_shim(self, sandbox_id: str, path: str) -> bytes:
        """The body of a GET by HTTP on the shim's socket. Raises OSError and ValueError, with its text escaped."""
        socket = f"{self.root}/{sandbox_id}/shim-monitor.sock"
        reader, writer = await asyncio.open_unix_connection(socket)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: shim\r\nConnection: close\r\n\r\n".encode())
            answer = await reader.read(_ANSWER_BYTES)
            while len(answer) < _ANSWER_BYTES and (part := await reader.read(_ANSWER_BYTES)):
                answer += part
        finally:
            writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        status = head.split(b" ", 2)[1:2]
        if status != [b"200"]:
            text = printable(body[:300].decode(errors="replace"))
            raise ValueError(text or "an answer that is not HTTP")
        return body

    @abc.abstractmethod
    async def stats(self, record: Record, use: Use) -> volumes.VolumeStats:
        """The numbers of the guest's kernel. Raises OSError and ValueError."""


@dataclass(frozen=True)
class KataBuilds:
    """The builds of Kata on the node. The build that made a sandbox has a directory of it."""

    _each: Sequence[KataBuild]

    def of(self, sandbox_id: str) -> KataBuild:
        """The runtime of a sandbox. Raises VmUnknown."""
        runtime = self.find(sandbox_id)
        if runtime is None:
            raise VmUnknown(sandbox_id, "none of Kata's runtimes has a directory of it")
        return runtime

    def find(self, sandbox_id: str) -> KataBuild | None:
        """The runtime of a sandbox; None if it is not Kata's. Raises `NotSeen`, and VmUnknown for no id."""
        check_id(sandbox_id)
        return next((runtime for runtime in self._each if runtime.has(sandbox_id)), None)


def not_attached(record: Record, sandbox_id: str, why: str) -> errors.CrustError:
    """The error of a volume that is not where its container would look for it."""
    return errors.NotReady.named(
        "VolumeNotAttached",
        f"the volume at {record.target} is not in the virtual machine of sandbox {sandbox_id}",
        why=why,
    )


def check_machine(sandbox_id: str, pid: int, engine_pid: int) -> None:
    """Raise VmUnknown, or `NotSeen`, unless engine, runtime and kernel agree that it is the sandbox's machine."""
    if engine_pid and engine_pid != pid:
        raise VmUnknown(
            sandbox_id, f"the engine names process {engine_pid}, and Kata process {pid}"
        )
    why = f"process {pid}, which Kata names, is not the sandbox's"
    if not pid:
        raise VmUnknown(sandbox_id, why)
    lines = _content(pid, "status").split(b"\n")
    parent = next((line.split()[1] for line in lines if line.startswith(b"PPid:")), b"0")
    contents = (_content(pid, "cmdline"), _content(pid, "cgroup"), _content(int(parent), "cmdline"))
    if not any(sandbox_id.encode() in text for text in contents):
        raise VmUnknown(sandbox_id, why)


def _content(pid: int, name: str) -> bytes:
    """A file of a process; empty if the process has ended. Raises `NotSeen`."""
    path = f"/proc/{pid}/{name}"
    answer = answers.ask(path, lambda: syscalls.read_whole(path), absent=hidden.ENDED)
    return answers.seen(answer) or b""


def check_id(text: str) -> None:
    """Raise VmUnknown for a text that is no id: an id becomes a part of a path, and is searched for in texts."""
    if len(text) < 8 or not text.isascii() or not text.replace("-", "").replace("_", "").isalnum():
        raise VmUnknown(text[:64], "this is not an id of a sandbox or a container")


def stats_of(answer: agent_pb2.VolumeStatsResponse) -> volumes.VolumeStats:
    """The numbers of a guest. Raises ValueError for impossible numbers, and without a number of bytes."""
    if len(answer.usage) > _USAGES_MAX or any(
        max(line.total, line.used, line.available) >= 2**63 for line in answer.usage
    ):
        raise ValueError("an answer with impossible numbers")
    usage = tuple(
        volumes.VolumeUsage(_UNITS[line.unit], line.total, line.used, line.available)
        for line in answer.usage
        if line.unit in _UNITS
    )
    if not any(line.unit is volumes.UsageUnit.BYTES for line in usage):
        raise ValueError("an answer without a number of bytes")
    return volumes.VolumeStats(usage)
