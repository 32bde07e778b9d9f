"""Values of the VM's interface: what a caller asks for, and what comes back.

What comes back from the guest is parsed by the pydantic models at the end: the guest is not trusted, so every
number has bounds and every list a length.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import pydantic


@dataclass(frozen=True, slots=True)
class FsGroup:
    """Give a volume to a group at mount time, with the kubelet's meaning of the two policies."""

    gid: int
    policy: Literal["Always", "OnRootMismatch"] = "Always"


@dataclass(frozen=True, slots=True)
class VolumeMount:
    """A filesystem to mount in the guest. `volume` is the disk's serial number, or the tag of a share."""

    volume: str
    fstype: str
    options: tuple[str, ...] = ()
    read_only: bool = False
    fs_group: FsGroup | None = None


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
    """A piece of what a container wrote."""

    stream: Literal["stdout", "stderr"]
    data: bytes


@dataclass(frozen=True, slots=True)
class Exit:
    """How a container ended: one of the two is set."""

    code: int | None
    signal: int | None


@dataclass(frozen=True, slots=True)
class Completed:
    """A container that ran to its end, and all that it wrote."""

    exit: Exit
    stdout: bytes
    stderr: bytes


Count = Annotated[int, pydantic.Field(ge=0, lt=2**63)]
Name = Annotated[str, pydantic.Field(max_length=64)]
Sentence = Annotated[str, pydantic.Field(max_length=4096)]


class Reply(pydantic.BaseModel):
    """An answer of the guest; keys that are not declared are an offence."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)


class Nothing(Reply):
    """An answer without content."""


class Hello(Reply):
    """Who answers."""

    protocol: Count
    kernel: Name
    agent: Name
    filesystems: list[Name] = pydantic.Field(max_length=64)
    volumes: list[Name] = pydantic.Field(max_length=1024)


class Usage(Reply):
    """A filesystem's bytes and inodes; `available` is what an unprivileged writer may still use."""

    total_bytes: Count
    available_bytes: Count
    used_bytes: Count
    total_inodes: Count
    available_inodes: Count
    used_inodes: Count

    def clamped(self, disk_bytes: int) -> "Usage":
        """The same with no number of bytes above the size of the disk, which the host knows by itself."""
        most = {
            name: min(getattr(self, name), disk_bytes)
            for name in ("total_bytes", "available_bytes", "used_bytes")
        }
        return self.model_copy(update=most)


class Mounted(Reply):
    """A mount that succeeded; `owned_entries` were given to the fsGroup."""

    usage: Usage
    owned_entries: Count


class Measured(Reply):
    """How full a volume is."""

    usage: Usage


class Grown(Reply):
    """A filesystem that fills its disk."""

    usage: Usage
    disk_bytes: Count


class Unmounted(Reply):
    """Whether there was anything to unmount."""

    was_mounted: bool


class Thawed(Reply):
    """Whether the volume was still frozen; if not, a copy taken meanwhile is worthless."""

    was_frozen: bool


class Condition(Reply):
    """The state of one mounted filesystem."""

    abnormal: bool
    message: Sentence


class Health(Reply):
    """The state of all mounted volumes, by name."""

    volumes: dict[Name, Condition] = pydantic.Field(max_length=1024)


class Started(Reply):
    """A container that runs."""

    pid: Count


class ContainerRow(Reply):
    """A container that nobody has released."""

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
    """An error as the guest words it."""

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
