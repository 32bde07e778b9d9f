"""A volume as the disk remembers it: one JSON object per volume, of a declared schema.

`phase` is the intent: "creating" is written before the image is made and "deleting" before it is removed, so a
crash between leaves something that the same request finishes.

The controller part writes it, and nobody else. What is known of the volume's bytes is another record's
(`content_record`), which the node part writes.
"""

from dataclasses import asdict
from typing import Annotated, Literal, Self

import pydantic

from crust import errors, volumes
from crust.blockdriver.records import stored_record
from crust.blockdriver.records.stored_record import StoredRecord

Phase = Literal["creating", "ready", "deleting"]


class UnreadableVolumeRecord(errors.Corrupt):
    """A volume's record is not what this driver writes."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"the volume's record {path} cannot be read",
            why=why,
            hint="restore it from a backup, or look at the image beside it by hand; nothing was changed",
        )
        self.path = path


class NewerVolumeRecord(errors.Corrupt):
    """A record that a later version of the driver wrote."""

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
    """A node that a CO published the volume to (ControllerPublishVolume), and how."""

    model_config = stored_record.PART

    node_id: str
    usage: Usage
    readonly: bool


class ContentSource(pydantic.BaseModel):
    """What a volume was made of (CSI volume_content_source), as it was then. `fs_type` is empty unless formatted."""

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
        """What is written of `value`."""
        return cls(**asdict(value))

    @property
    def value(self) -> volumes.IoLimits:
        """What was written."""
        return volumes.IoLimits(**{name: getattr(self, name) for name in type(self).model_fields})


class VolumeRecord(StoredRecord):
    """What a CO asked for, and was promised. Sizes are bytes."""

    UNREADABLE = UnreadableVolumeRecord
    NEWER = NewerVolumeRecord

    volume_id: str
    name: str
    phase: Phase
    capacity_bytes: Annotated[int, pydantic.Field(gt=0)]
    parameters: dict[str, str]
    usages: tuple[Usage, ...]
    content_source: ContentSource | None = None
    """What the first content was made of; None for zeros."""
    nodes: tuple[Attached, ...] = ()
    """Where ControllerPublishVolume published it; one entry per node."""
    limits: Limits = Limits()
    """What its users may do at most. They are the volume's, not its content's: a copy of it has its own."""
    limits_before: Limits | None = None
    """While a change of `limits` is not in force everywhere: what was before it."""

    @property
    def io_limits(self) -> volumes.IoLimits:
        """`limits` as a value."""
        return self.limits.value
