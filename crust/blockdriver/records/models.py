"""The three kinds of records of a pool, as they are stored: one JSON object each, with a schema number.

The driver reads the number first, and refuses a record of any other schema (`crust.blockdriver.schema`). Within a
schema fields are only added: the driver keeps unknown fields and writes them back, so that a return to an earlier
version loses no field.

*Volume record*: only the controller part writes it. *Content record*: the controller part writes it once, before it
answers CreateVolume: "new" for zeros, or the state of the content source. From the first stage on, only the node part
that has the volume staged writes it. Its `state` only moves forward: a volume is formatted by this driver while it is
"new" and at no other time.

    new ──stage for a filesystem──> formatting ──mkfs ended──> formatted
     └────────────stage as a raw device────────────────────────> raw <──┘

"formatting" means that mkfs was started with the UUID of the record, and that no user had the device at that write. A
record can be older than the bytes, restored from a backup: so a complete filesystem of that UUID counts as formatted,
and stays (`format_decision`).

*Snapshot set*: one snapshot, or the snapshots of a group, which are taken and deleted together; the record is never
rewritten. A snapshot is independent of its volume, and keeps the state of the content, so that it can be restored
after the volume was changed or deleted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

import pydantic

from crust.blockdriver import schema
from crust.core import deferral_keys, errors, volumes

SCHEMA = 2
ContentState = Literal["new", "formatting", "formatted", "raw"]


class VolumeNotFound(errors.NotFound):
    def __init__(self, volume_id: str) -> None:
        super().__init__(f"there is no volume {volume_id!r}")


class RecordMissing(errors.Corrupt):
    def __init__(self, volume_id: str, path: str) -> None:
        super().__init__(
            f"the content of {volume_id} is unknown",
            why=f"its content record {path} does not exist, and the driver did not remove it",
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """The part of a record that stays in memory, for sums, pages and the check that it exists."""

    capacity_bytes: int = 0
    thick: bool = False
    nodes: tuple[str, ...] = ()
    snapshots: tuple[tuple[str, str], ...] = ()
    """The snapshots of a set, each with its volume."""


class Part(pydantic.BaseModel):
    """A record, or a part of one."""

    model_config = pydantic.ConfigDict(frozen=True, extra="allow", strict=True)


class StoredRecord(Part):
    """The common part of all records. A copy keeps the `stored` bytes: a write in place of other bytes is refused."""

    ID_FIELD: ClassVar[str] = "volume_id"

    version: Annotated[int, pydantic.Field(alias="schema")] = SCHEMA
    revision: Annotated[int, pydantic.Field(ge=0)] = 1
    """The number of its writes: a write of the same content again makes older knowledge stale, too."""
    stored: Annotated[bytes | None, pydantic.Field(exclude=True, repr=False)] = None
    """The bytes that this record was read from, or written as; no part of it. None before the first write."""

    @property
    def key(self) -> str:
        return str(getattr(self, self.ID_FIELD))

    @property
    def summary(self) -> Summary:
        return Summary()

    @classmethod
    def missing(cls, record_id: str, path: str) -> errors.CrustError:
        raise NotImplementedError

    @classmethod
    def parse(cls, data: bytes, key: str, shown: Callable[[str], str]) -> Self:
        """Decode the record of an id; raises RecordUnreadable for the file that is `shown`."""
        try:
            record = schema.read(cls.model_validate_json, data, SCHEMA)
            if record.key != key:
                raise schema.Unreadable(f"it describes {record.key}")
        except schema.Unreadable as err:
            raise errors.Corrupt.named(
                "RecordUnreadable", f"the record {shown(key)} cannot be read", why=str(err)
            ) from err
        return record.model_copy(update={"stored": data})

    def encode(self) -> bytes:
        """The record as one line of JSON."""
        return self.model_dump_json(by_alias=True).encode() + b"\n"

    def replaced(self, **changes: object) -> Self:
        """A checked copy with `changes`, which name fields of this version."""
        assert changes.keys() <= type(self).model_fields.keys()
        fields = {**self.model_dump(by_alias=True), "stored": self.stored, **changes}
        return type(self).model_validate(fields)


class Usage(Part):
    """One capability that the volume was created for, without mount flags, which may be sensitive."""

    kind: Literal["mount", "block"]
    fs_type: str
    mode: int


class Attached(Part):
    """A node that a CO published the volume to (ControllerPublishVolume), with the arguments."""

    node_id: str
    usage: Usage
    readonly: bool


class ContentSource(Part):
    """The content source of a volume (CSI volume_content_source) at its creation; `fs_type` if it was formatted."""

    kind: Literal["snapshot", "volume"]
    id: str
    size_bytes: int
    fs_type: str
    format_in: deferral_keys.FormatIn


class Limits(Part):
    """I/O limits per second; 0 is none."""

    read_iops: Annotated[int, pydantic.Field(ge=0, lt=2**63)] = 0
    write_iops: Annotated[int, pydantic.Field(ge=0, lt=2**63)] = 0
    read_bytes_per_second: Annotated[int, pydantic.Field(ge=0, lt=2**63)] = 0
    write_bytes_per_second: Annotated[int, pydantic.Field(ge=0, lt=2**63)] = 0

    @property
    def value(self) -> volumes.IoLimits:
        return volumes.IoLimits(
            self.read_iops, self.write_iops, self.read_bytes_per_second, self.write_bytes_per_second
        )


class VolumeRecord(StoredRecord):
    """A volume as the CO requested it. Sizes are bytes."""

    volume_id: volumes.VolumeId
    name: str
    capacity_bytes: Annotated[int, pydantic.Field(gt=0)]
    parameters: dict[str, str]
    usages: tuple[Usage, ...]
    thick: bool = False
    """Whether it has all of its blocks, from its creation on."""
    content_source: ContentSource | None = None
    """The content source; None for zeros."""
    nodes: tuple[Attached, ...] = ()
    """The nodes of ControllerPublishVolume, one entry per node."""
    limits: Limits = Limits()
    """Its I/O limits. They belong to the volume, not to its content: a copy has its own."""
    limits_before: Limits | None = None
    """The previous limits, until a change of `limits` is enforced everywhere."""

    @property
    def summary(self) -> Summary:
        nodes = tuple(node.node_id for node in self.nodes)
        return Summary(capacity_bytes=self.capacity_bytes, thick=self.thick, nodes=nodes)

    @classmethod
    def missing(cls, record_id: str, path: str) -> errors.CrustError:
        return VolumeNotFound(record_id)


class ContentRecord(StoredRecord):
    """The content of a volume. Sizes are bytes."""

    volume_id: volumes.VolumeId
    format_in: deferral_keys.FormatIn
    """The kernels that may parse the content; snapshots and clones keep it, and nothing else decides it later."""
    state: ContentState = "new"
    fs_type: str = ""
    """The filesystem that was made, or is being made; empty otherwise."""
    planned_uuid: str = ""
    """The UUID of the filesystem that is being made; empty otherwise."""
    filled_bytes: int = 0
    """The device size that the filesystem was last made or grown for; growth is due if the device is larger."""
    growth_refused: str = ""
    """The reason why the filesystem is smaller than its device; empty if it is not, or if a guest will grow it."""
    nobody_grows: bool = False
    """Whether neither the guest that last could write it nor the proxy grows the filesystem."""
    generation: int = 0
    """+1 whenever the content is replaced other than by its users' writes."""
    in_guest: bool = False
    """Whether a guest could ever write the content: a host that may parse it mounts it as untrusted."""

    @classmethod
    def missing(cls, record_id: str, path: str) -> errors.CrustError:
        """Without a content record a volume is in doubt, not "new": the driver does not format it."""
        return RecordMissing(record_id, path)


class Snapshot(Part):
    """One snapshot of a set. Sizes are bytes."""

    snapshot_id: str
    source_volume_id: volumes.VolumeId
    size_bytes: Annotated[int, pydantic.Field(gt=0)]
    state: ContentState
    """The state of the volume's content."""
    fs_type: str
    planned_uuid: str = ""
    filled_bytes: int
    in_guest: bool = False
    format_in: deferral_keys.FormatIn


class SnapshotSet(StoredRecord):
    """A single snapshot, whose id is the set's, or a group snapshot; `snapshots` by volume id."""

    ID_FIELD = "set_id"

    set_id: str
    name: str
    created_ns: int
    """The point in time, in nanoseconds since 1970."""
    snapshots: tuple[Snapshot, ...]

    @property
    def summary(self) -> Summary:
        volumes_of = (
            (snapshot.snapshot_id, snapshot.source_volume_id) for snapshot in self.snapshots
        )
        return Summary(snapshots=tuple(volumes_of))
