"""Core types: ids, paths, capabilities, usage, a deferred mount.

No I/O and no wire types: the codecs (`crust.rpc.messages.csi`, `crust.rpc.messages.crust_v1`) convert protobuf
messages into these types, and all other packages use only these. A value that exists is valid: code that gets a
`TargetPath` need not check it again, except for symbolic links, which must be checked at the moment of use
(`crust.host.files.target_paths`).
"""

import enum
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType, Self

from crust.core import errors

VolumeId = NewType("VolumeId", str)
DriverName = NewType("DriverName", str)

PATH_MAX_BYTES = 4096
NAME_MAX_BYTES = 255
ID_MAX_BYTES = 128
"""CSI size limit of strings: 128 bytes unless a field says otherwise."""
_SANDBOX_ID_MAX_CHARS = 256
HANDLER_NAME = r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?"
CONTROL = re.compile("[\0-\x1f\x7f-\x9f]")
"""A control character of C0 or C1: no CO and no runtime gives a path that has one."""
_PRIVATE = re.compile(r"/volumeDevices/(staging|publish)/crust-[0-9a-f]{40}(/|$)")


class InvalidPath(errors.InvalidRequest):
    def __init__(self, role: str, path: str, why: str) -> None:
        shown = path if len(path) <= 200 else f"{path[:200]}… ({len(os.fsencode(path))} bytes)"
        super().__init__(f"{role} {shown!r} is invalid", why=why)


class HandlerName(str):
    """The name of a runtime handler: 1 to 63 of a-z, 0-9, "-" and ".", with a letter or a digit at both ends.

    There is no other value: the constructor raises `errors.InvalidRequest`.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        if not re.fullmatch(HANDLER_NAME, text):
            raise errors.InvalidRequest(
                f"a runtime handler cannot have the name {text[:64]!r}",
                why="it is not 1 to 63 of a-z, 0-9, '-' and '.', with a letter or a digit at both ends",
            )
        return super().__new__(cls, text)


class SandboxId(str):
    """The id of a sandbox, as its runtime names it: 1 to 256 characters, none of which is a control character (H-24).

    There is no other value: the constructor raises `errors.InvalidRequest`.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        why = "it is not 1 to 256 characters" * (not 0 < len(text) <= _SANDBOX_ID_MAX_CHARS)
        why = why or "it holds a control character" * bool(CONTROL.search(text))
        if why:
            raise errors.InvalidRequest(f"a sandbox cannot have the id {text[:64]!r}", why=why)
        return super().__new__(cls, text)


def is_number(text: str) -> bool:
    """Whether a text of a request is a decimal number of 64 bits at most. Python refuses to parse 4,300 digits."""
    return len(text) <= 20 and text.isascii() and text.isdecimal()


def is_private(path: str) -> bool:
    """Whether a path belongs to a shim, whose driver stages and publishes the device of a deferred volume there."""
    return _PRIVATE.search(path) is not None


@dataclass(frozen=True, slots=True, order=True)
class TargetPath:
    """A target path of CSI: absolute, normalised, not longer than the system allows (path_resolution(7)).

    The text is kept exactly as it was sent, because its digest names the entry in the handoff directory (KEP-2857).
    """

    text: str

    @classmethod
    def parse(cls, text: str, *, role: str = "target_path") -> Self:
        """Check `text`; raises `InvalidPath`."""
        if not text:
            raise InvalidPath(role, text, "it is empty")
        if CONTROL.search(text):
            raise InvalidPath(role, text, "it holds a control character")
        if not text.startswith("/"):
            raise InvalidPath(role, text, "it is relative")
        parts = text.split("/")[1:]
        if ".." in parts or "." in parts:
            raise InvalidPath(role, text, "it has a '.' or '..' component")
        if "" in parts:
            raise InvalidPath(role, text, "it has an empty component or a trailing slash")
        size = len(os.fsencode(text))
        if size >= PATH_MAX_BYTES:
            raise InvalidPath(role, text, f"it is longer than {PATH_MAX_BYTES - 1} bytes")
        if size > NAME_MAX_BYTES and any(len(os.fsencode(part)) > NAME_MAX_BYTES for part in parts):
            raise InvalidPath(role, text, f"a component is longer than {NAME_MAX_BYTES} bytes")
        return cls(text)

    @property
    def digest(self) -> str:
        """SHA-256 of the path's bytes, 64 lower-case hex digits: the name of its entry in the handoff directory."""
        return hashlib.sha256(os.fsencode(self.text)).hexdigest()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, order=True)
class VolumeKey:
    """A volume's name across drivers: the key that serialises its operations."""

    driver: DriverName
    volume_id: VolumeId

    def __str__(self) -> str:
        return f"{self.driver}/{self.volume_id}"


class GroupPolicy(enum.Enum):
    """When the group of a volume's files is changed (KEP-2857, fsGroupChangePolicy).

    Where a CO names no policy it is OnRootMismatch: released kubelets pass a group without a policy, and a walk of
    all files at every start of a pod takes hours on a large volume. The root gets its group last, so that a walk that
    was interrupted is repeated.
    """

    ALWAYS = "Always"
    ON_ROOT_MISMATCH = "OnRootMismatch"


@dataclass(frozen=True, slots=True)
class GroupChange:
    """The group that the files of a volume shall get.

    `gid` is 1 to 2**32 - 2; 0 is allowed for a mount on the host.
    """

    gid: int
    policy: GroupPolicy = GroupPolicy.ON_ROOT_MISMATCH

    @classmethod
    def parse(cls, gid: str, policy: GroupPolicy = GroupPolicy.ON_ROOT_MISMATCH) -> Self:
        """Parse the decimal text of a group for a runtime; raises `InvalidRequest`.

        0 is refused, because runtimes silently ignore it. 2**32 - 1 is refused, because for chown(2) it means "do not
        change".
        """
        if not is_number(gid) or not 1 <= int(gid) <= 2**32 - 2:
            raise errors.InvalidRequest(
                f"the volume's group {gid[:32]!r} is invalid",
                why="it must be a decimal number from 1 to 4294967294",
                hint="correct fsGroup in the pod's security context",
            )
        return cls(int(gid), policy)

    def __str__(self) -> str:
        return f"{self.gid} ({self.policy.value})"


@dataclass(frozen=True, slots=True)
class DeviceIdentity:
    """Identifies a block device independently of its name.

    `disk_sequence` is the kernel's diskseq: it changes whenever a disk is attached again, and a resize keeps it. So a
    reused loop device number is not mistaken for the device that was published.
    """

    major: int
    minor: int
    disk_sequence: int

    def __str__(self) -> str:
        return f"{self.major}:{self.minor}@{self.disk_sequence}"


@dataclass(frozen=True, slots=True)
class BlockSource:
    """A block device on this node: its path and its identity."""

    path: str
    identity: DeviceIdentity


@dataclass(frozen=True, slots=True)
class NetworkImage:
    """An image in a Ceph cluster, which a hypervisor opens itself: there is no device of this host.

    `cluster` is the cluster's id (fsid), which tells two clusters with equal names apart; `namespace` is empty for
    the pool's default one; `monitors` are addresses as `mon_host` has them. The key of `user` is a secret and no part
    of this: it arrives with the call that needs it.
    """

    cluster: str
    pool: str
    namespace: str
    image: str
    monitors: tuple[str, ...]
    user: str

    @property
    def identity(self) -> str:
        """The image's name among all clusters, the same for each user and each list of monitors."""
        return f"rbd:{self.cluster}/{self.pool}/{self.namespace}/{self.image}"

    def __str__(self) -> str:
        return "/".join(part for part in (self.pool, self.namespace, self.image) if part)


@dataclass(frozen=True, slots=True)
class IoLimits:
    """Upper limits of a volume's I/O, per second; 0 is no limit."""

    read_iops: int = 0
    write_iops: int = 0
    read_bytes_per_second: int = 0
    write_bytes_per_second: int = 0


@dataclass(frozen=True, slots=True)
class GuestFormat:
    """The mounting kernel makes the filesystem, if the device is blank. The options have an effect for ext4 only.

    `ext4_bytes_per_inode` is 4096 to 64 MiB, `ext4_reserved_percent` 0 to 50; None: mkfs chooses.
    """

    ext4_bytes_per_inode: int | None = None
    ext4_reserved_percent: int | None = None

    def __post_init__(self) -> None:
        """Raise `InvalidRequest` for values that mkfs refuses."""
        ranges = {"ext4_bytes_per_inode": (4096, 2**26), "ext4_reserved_percent": (0, 50)}
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise errors.InvalidRequest(
                    "the options for making the filesystem are invalid",
                    why=f"{name} is {value}",
                    hint=f"it is a number from {least} to {most}",
                )


class Encryption(enum.Enum):
    """The layer between the device and its filesystem."""

    LUKS = "luks"


@dataclass(frozen=True, slots=True)
class DeferredMount:
    """A driver returns this instead of mounting: everything that another kernel needs to mount the volume.

    `capacity_bytes` is the device's or image's size. `content_generation` changes when the driver replaced the
    volume's content (created, formatted, restored it); writes by users do not change it. `format` is None if the
    volume must not be formatted. `secrets` open the layer that `encryption` names, or are the key of an image's
    user (`crust.core.deferral_keys`); they are in no record and no text of this object.
    """

    source: BlockSource | NetworkImage
    fs_type: str
    mount_options: tuple[str, ...] = ()
    group: GroupChange | None = None
    readonly: bool = False
    capacity_bytes: int = 0
    content_generation: int = 0
    io_limits: IoLimits = IoLimits()
    format: GuestFormat | None = None
    encryption: Encryption | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def image(self) -> NetworkImage | None:
        return self.source if isinstance(self.source, NetworkImage) else None

    @property
    def needs_secrets(self) -> bool:
        """Whether a mount needs `secrets`: then only a guest sees the filesystem."""
        return self.encryption is not None or self.image is not None


class UsageUnit(enum.Enum):
    """Units of `VolumeUsage`, as in CSI."""

    BYTES = 1
    INODES = 2


@dataclass(frozen=True, slots=True)
class VolumeUsage:
    """One line of volume statistics. `available` is the amount that an unprivileged writer can still use."""

    unit: UsageUnit
    total: int
    used: int
    available: int


@dataclass(frozen=True, slots=True)
class VolumeCondition:
    """A volume's health: whether it is abnormal, and a message for people."""

    abnormal: bool
    message: str


@dataclass(frozen=True, slots=True)
class VolumeStats:
    """Usage, and the volume's condition if it is known."""

    usage: tuple[VolumeUsage, ...]
    condition: VolumeCondition | None = None


@dataclass(frozen=True, slots=True)
class CapacityRange:
    """A requested size in bytes. 0 means "not given" for either field (CSI CapacityRange)."""

    required_bytes: int = 0
    limit_bytes: int = 0


class HandlerFeature(enum.Enum):
    """The abilities of a runtime handler beyond mounting, with the numbers of crust.v1.HandlerFeature."""

    GROUP = 1
    GROUP_CHANGE_POLICY = 2
    ONLINE_EXPAND = 4
    STATS = 5
    READ_ONLY = 6
    HEALTH = 8
    FREEZE = 9
    IO_LIMITS = 10
    FORMAT = 11
    LUKS = 12
    NETWORK_IMAGE = 13
    GROW = 14
    SUB_PATH = 15


class AccessMode(enum.Enum):
    """CSI VolumeCapability.AccessMode.Mode, by its numbers."""

    SINGLE_NODE_WRITER = 1
    SINGLE_NODE_READER_ONLY = 2
    MULTI_NODE_READER_ONLY = 3
    MULTI_NODE_SINGLE_WRITER = 4
    MULTI_NODE_MULTI_WRITER = 5
    SINGLE_NODE_SINGLE_WRITER = 6
    SINGLE_NODE_MULTI_WRITER = 7

    @property
    def reader_only(self) -> bool:
        return self in (AccessMode.SINGLE_NODE_READER_ONLY, AccessMode.MULTI_NODE_READER_ONLY)


@dataclass(frozen=True, slots=True)
class MountAccess:
    """Access through a filesystem. `mount_flags` may hold credentials: never log them."""

    fs_type: str = ""
    mount_flags: tuple[str, ...] = field(default=(), repr=False)
    group: GroupChange | None = None


@dataclass(frozen=True, slots=True)
class BlockAccess:
    """Access to the raw block device."""


@dataclass(frozen=True, slots=True)
class VolumeCapability:
    access: MountAccess | BlockAccess
    mode: AccessMode
