"""Values of the VM's interface: requests of the caller, and answers of the guest.

The pydantic models below parse the guest's answers. The guest is not trusted, so every number has bounds and every
list a maximum length.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pydantic

from crust.core import volumes


@dataclass(frozen=True, slots=True)
class FsGroup:
    """Give a volume to a group, with the kubelet's meaning of the two policies."""

    gid: int
    policy: Literal["Always", "OnRootMismatch"] = "Always"


@dataclass(frozen=True, slots=True)
class VolumeMount:
    """A filesystem to mount in the guest. `volume` is the disk's serial number, or the tag of a share."""

    volume: str
    fstype: str
    options: tuple[str, ...] = ()
    read_only: bool = False
    format: volumes.GuestFormat | None = None
    """Make the filesystem first, if the disk is blank."""
    encrypted: bool = False
    """The filesystem is in a LUKS container, which is made first, if the disk is blank and `format` is set."""
    passphrase: str | None = field(default=None, repr=False)
    """Opens the container; not needed for an open container."""


@dataclass(frozen=True, slots=True)
class Bind:
    """A mounted volume, or a path inside it, bound into a container."""

    volume: str
    destination: str
    sub_path: str = ""
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """A command to run in the guest, with its own namespaces. Programs are those of the guest image."""

    name: str
    command: tuple[str, ...]
    binds: tuple[Bind, ...] = ()
    environment: Mapping[str, str] | None = None
    directory: str = "/"
    uid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of a container's output."""

    stream: Literal["stdout", "stderr"]
    data: bytes


@dataclass(frozen=True, slots=True)
class Exit:
    """How a container ended: one of the two is set."""

    code: int | None
    signal: int | None


@dataclass(frozen=True, slots=True)
class Completed:
    """A container that has ended, with all its output."""

    exit: Exit
    stdout: bytes
    stderr: bytes


Count = Annotated[int, pydantic.Field(ge=0, lt=2**63)]
Name = Annotated[str, pydantic.Field(max_length=64)]
Sentence = Annotated[str, pydantic.Field(max_length=4096)]


class Reply(pydantic.BaseModel):
    """An answer of the guest; undeclared keys are a protocol violation."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)


class Empty(Reply):
    """An answer without content."""


class Hello(Reply):
    """The agent's answer to `hello`."""

    protocol: Count
    kernel: Name
    agent: Name
    filesystems: list[Name] = pydantic.Field(max_length=64)
    volumes: list[Name] = pydantic.Field(max_length=1024)


class Usage(Reply):
    """A filesystem's bytes and inodes; `available` is the rest for an unprivileged writer."""

    total_bytes: Count
    available_bytes: Count
    used_bytes: Count
    total_inodes: Count
    available_inodes: Count
    used_inodes: Count

    def clamped(self, disk_bytes: int) -> "Usage":
        """The same with no number of bytes above the disk's size, which the host knows."""
        clamped = {
            name: min(getattr(self, name), disk_bytes)
            for name in ("total_bytes", "available_bytes", "used_bytes")
        }
        return self.model_copy(update=clamped)


class Measured(Reply):
    """The usage of a volume."""

    usage: Usage


class Mounted(Measured):
    """A mount that succeeded."""


class Owned(Reply):
    """How many entries were given to the fsGroup so far, and whether that is all."""

    done: bool
    owned_entries: Count


class Grown(Reply):
    """A filesystem that was grown to its disk's size."""

    usage: Usage
    disk_bytes: Count


class Unmounted(Reply):
    """Whether the volume was mounted."""

    was_mounted: bool


class Thawed(Reply):
    """Whether the volume was still frozen; if not, a copy taken meanwhile is not crash-consistent."""

    was_frozen: bool


class Condition(Reply):
    """The condition of one mounted filesystem."""

    abnormal: bool
    message: Sentence


class Started(Reply):
    """A container that runs."""

    pid: Count


class ContainerRow(Reply):
    """A container that is not released yet."""

    container: Name
    running: bool
    volumes: list[Name] = pydantic.Field(max_length=64)
    command: Sentence


class ContainerList(Reply):
    """All containers of a VM."""

    containers: list[ContainerRow] = pydantic.Field(max_length=256)


class Stopped(Reply):
    """A guest about to power off; `stuck` volumes could not be unmounted."""

    stuck: list[Name] = pydantic.Field(max_length=1024)


class Failure(Reply):
    """An error of the guest."""

    code: Name
    message: Sentence
    hint: Sentence


class Line(pydantic.BaseModel):
    """Any line from the guest: an answer (`ok` or `error`) or an event."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    id: Name | None = None
    ok: dict[str, object] | None = None
    error: Failure | None = None
    event: Literal["output", "exit"] | None = None
    container: Name | None = None
    stream: Literal["stdout", "stderr"] | None = None
    data: str | None = None
    code: int | None = None
    signal: int | None = None
