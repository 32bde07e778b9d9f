"""The record of a volume on disk: one JSON object per volume, of a declared schema.

`phase` is the intent: "creating" is written before the image is made and "deleting" before it is removed, so a
crash between leaves something that the same request finishes.

Only the controller part writes it. The state of the volume's content is in another record
(`content_record`), which the node part writes.
"""

from dataclasses import asdict
from typing import Annotated, Literal, Self

import pydantic

from crust import errors, volumes
from crust.blockdriver.records import stored_record
from crust.blockdriver.records.stored_record import Remembered, StoredRecord

Phase = Literal["creating", "ready", "deleting"]


class UnreadableVolumeRecord(errors.Corrupt):
    """The record of a volume cannot be read."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"the volume's record {path} cannot be read",
            why=why,
            hint="restore it from a backup, or check the volume's image by hand; nothing was changed",
        )
        self.path = path


class NewerVolumeRecord(errors.Corrupt):
    """The record of a volume was written by a later version of the driver."""

    def __init__(self, path: str, found: int) -> None:
        super().__init__(
            f"the volume's record {path} has schema {found}",
            why=f"this version of the driver knows schemas up to {stored_record.SCHEMA}",
            hint="run the version that wrote it, or a later one",
        )
        self.path = path
        self.found = found


class Usage(pydantic.BaseModel):
    """One capability that the volume was created for; mount flags are not kept, they may be sensitive."""

    model_config = stored_record.PART

    kind: Literal["mount", "block"]
    fs_type: str
    mode: int


class Attached(pydantic.BaseModel):
    """A node that a CO published the volume to (ControllerPublishVolume), with the arguments."""

    model_config = stored_record.PART

    node_id: str
    usage: Usage
    readonly: bool


class ContentSource(pydantic.BaseModel):
    """The content source of a volume (CSI volume_content_source), as it was then; `fs_type` if it was formatted."""

    model_config = stored_record.PART

    kind: Literal["snapshot", "volume"]
    id: str
    size_bytes: int
    fs_type: str


class Limits(pydantic.BaseModel):
    """I/O limits per second; 0 is none."""

    model_config = stored_record.PART

    read_iops: Annotated[int, pydantic.Field(ge=0, lt=2**63)] = 0
    write_iops: Annotated[int, pydantic.Field(ge=0, lt=2**63)] = 0
    read_bytes_per_second: Annotated[int, pydantic.Field(ge=0, lt=2**63)] = 0
    write_bytes_per_second: Annotated[int, pydantic.Field(ge=0, lt=2**63)] = 0

    @classmethod
    def of(cls, value: volumes.IoLimits) -> Self:
        """The record's form of `value`."""
        return cls(**asdict(value))

    @property
    def value(self) -> volumes.IoLimits:
        """The limits as a value."""
        return volumes.IoLimits(
            self.read_iops,
            self.write_iops,
            self.read_bytes_per_second,
            self.write_bytes_per_second,
        )


class VolumeRecord(StoredRecord, Remembered):
    """A volume as the CO requested it. Sizes are bytes."""

    UNREADABLE = UnreadableVolumeRecord
    NEWER = NewerVolumeRecord

    volume_id: str
    name: str
    phase: Phase
    capacity_bytes: Annotated[int, pydantic.Field(gt=0)]
    parameters: dict[str, str]
    usages: tuple[Usage, ...]
    content_source: ContentSource | None = None
    """The content source; None for zeros."""
    nodes: tuple[Attached, ...] = ()
    """The nodes of ControllerPublishVolume, one entry per node."""
    limits: Limits = Limits()
    """Its I/O limits. They belong to the volume, not to its content: a copy has its own."""
    limits_before: Limits | None = None
    """The previous limits, until a change of `limits` is enforced everywhere."""
    attempt: str = ""
    """Who makes or deletes it, drawn at random: two who do are never equal. Empty in older ones."""

    @property
    def io_limits(self) -> volumes.IoLimits:
        """`limits` as a value."""
        return self.limits.value
