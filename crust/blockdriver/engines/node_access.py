"""What the node part needs of an engine: `NodeAccess`, which makes a volume usable on this node.

That need not mean a block device of this host: an image that a hypervisor opens itself has none, and a call that does
need one, a host mount above all, is refused (`NoHostDevice`). The rules of `protocol` are the same here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from crust.core import errors, volumes


class NoHostDevice(errors.NotReady):
    """A volume without a block device on this host: only a hypervisor opens it."""

    def __init__(
        self, why: str = "its engine makes no block device: only a hypervisor can open it"
    ) -> None:
        super().__init__(
            "the volume cannot be used on this host",
            why=why,
            hint="publish it with deferral, to a runtime that opens such images",
        )


@dataclass(frozen=True, slots=True)
class Attachment:
    """A volume that is usable on this node: by a device of this host, or as an image that only a hypervisor opens."""

    source: volumes.BlockSource | volumes.NetworkImage
    size_bytes: int
    is_new: bool = field(default=False, compare=False)
    """Whether the call that returned it has made the device: then no process has opened that before."""

    @property
    def device(self) -> volumes.BlockSource | None:
        """The device of this host; None where only a hypervisor opens the volume."""
        return self.source if isinstance(self.source, volumes.BlockSource) else None

    @property
    def host_device(self) -> volumes.BlockSource:
        """The device of this host; raises `NoHostDevice` if there is none."""
        if not isinstance(self.source, volumes.BlockSource):
            raise NoHostDevice()
        return self.source

    @property
    def shown(self) -> str:
        """The device or image, for messages."""
        if isinstance(self.source, volumes.BlockSource):
            return self.source.path
        return f"{self.source}, which only a hypervisor opens"


@dataclass(frozen=True, slots=True)
class Access:
    """How a volume is to be attached. `secrets` came with the call: they are kept in memory only, and never shown."""

    mode: volumes.AccessMode = volumes.AccessMode.SINGLE_NODE_WRITER
    readonly: bool = False
    on_host: bool = False
    """Whether this host itself uses it, by a block device; else a hypervisor may open it. Engines whose volumes are
    such devices anyway need not look."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)


READ_WRITE = Access()


class NodeAccess(Protocol):
    """The volumes that this node uses. Errors are crust's; sizes are bytes."""

    def use(self, volume_id: volumes.VolumeId, secrets: Mapping[str, str]) -> None:
        """Take the credentials that a call brought for a volume, and for the records of its pool, in memory, until
        `detach`; before anything else of the call. An engine that needs none ignores them. Raises `Refused` for those
        that the storage does not accept, `NotReady` if there are none and none are known.
        """
        ...

    def attach(self, volume_id: volumes.VolumeId, access: Access = READ_WRITE) -> Attachment:
        """Attach the volume on this node; idempotent. Raises `ImageMissing`, `Exhausted`; `NoHostDevice` where a
        device of this host is asked for, and cannot be made.

        With an access that writes the node is the volume's only writer until `detach`, durably, where another node
        could reach the image; raises `NotReady` naming the holder while another one has it.
        """
        ...

    def attached_here(self) -> tuple[volumes.VolumeId, ...]:
        """The volumes that may be attached on this node, whichever process attached them."""
        ...

    def attached(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """How the volume is attached on this node now, if it is."""
        ...

    def host_device(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """The attachment, if this host itself has a device of the volume. Asks this host alone, and no storage."""
        ...

    def orphans(self) -> tuple[Attachment, ...]:
        """Attachments that this engine made for images that were removed or replaced since; no others."""
        ...

    def drop(self, orphan: Attachment) -> None:
        """Detach an orphan; one that is detached is a success. Raises `NotReady` while in use."""
        ...

    def refresh(self, volume_id: volumes.VolumeId) -> Attachment | None:
        """Give an attached volume's device its image's size; None when it is not attached."""
        ...

    def is_empty(self, volume_id: volumes.VolumeId) -> bool:
        """Whether the engine stores no data for the volume, so that every byte of it reads as zero.

        What was written to this node's device counts once it is written back (`devices.sync`). True is exact; False
        may be wrong. Raises `ImageMissing`.
        """
        ...

    def detach(self, volume_id: volumes.VolumeId) -> None:
        """Detach, and verify it; not attached is a success. Raises `NotReady` while in use."""
        ...
