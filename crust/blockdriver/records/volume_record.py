"""A volume as the disk remembers it: one JSON object per volume, of a declared schema.

`phase` is the intent: "creating" is written before the image is made and "deleting" before it is removed, so a
crash between leaves something that the same request finishes. `content` is what the driver knows of the bytes, and
it only moves forward: a volume is formatted by this driver while it is "new" and at no other time.

    new ──stage for a filesystem──> formatting ──mkfs ended──> formatted
     └────────────stage as a raw device────────────────────────> raw <──┘

"formatting" means that mkfs was begun and nobody was ever given the device: publishing needs a finished stage.
"""

from dataclasses import asdict
from typing import Annotated, Literal, Self

import pydantic

from crust import errors, volumes

SCHEMA = 1
LIMIT_BYTES = 64 * 1024

Phase = Literal["creating", "ready", "deleting"]
Content = Literal["new", "formatting", "formatted", "raw"]


UNREADABLE = (errors.Corrupt, errors.Refused, errors.RuntimeFailed)
"""What is wrong with one volume's record or image alone: damaged, another user's, a bad sector."""


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
            why=f"this version of the driver knows schemas up to {SCHEMA}",
            hint="run the version that wrote it, or a later one",
        )
        self.path = path
        self.found = found


class Usage(pydantic.BaseModel):
    """One capability that the volume was created for; mount flags are not kept, they may be sensitive."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Literal["mount", "block"]
    fs_type: str
    mode: int


class Attached(pydantic.BaseModel):
    """A node that a CO published the volume to (ControllerPublishVolume), and how."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    node_id: str
    usage: Usage
    readonly: bool


class ContentSource(pydantic.BaseModel):
    """What a volume was made of (CSI volume_content_source), as it was then. `fs_type` is empty unless formatted."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Literal["snapshot", "volume"]
    id: str
    size_bytes: int
    fs_type: str


class Limits(pydantic.BaseModel):
    """I/O limits per second; 0 is none."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

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
        return volumes.IoLimits(**self.model_dump())


class Record(pydantic.BaseModel):
    """What is known of a volume. Sizes are bytes."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Annotated[int, pydantic.Field(alias="schema")] = SCHEMA
    volume_id: str
    name: str
    phase: Phase
    capacity_bytes: Annotated[int, pydantic.Field(gt=0)]
    parameters: dict[str, str]
    usages: tuple[Usage, ...]
    content: Content = "new"
    fs_type: str = ""
    """The filesystem that was made, or is being made; empty otherwise."""
    filled_bytes: int = 0
    """The size of the device that the filesystem was last made or grown for; a larger one means growth is due."""
    generation: int = 0
    """+1 whenever the content is replaced by something other than its users' writes."""
    origin: ContentSource | None = None
    """Where the first content came from; None for zeros."""
    in_guest: bool = False
    """Whether a guest ever could write the content: what it left is not mounted on this host unasked."""
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

    @classmethod
    def parse(cls, data: bytes, path: str) -> Self:
        """Read a record; raises `UnreadableVolumeRecord`, `NewerVolumeRecord`."""
        try:
            head = _Head.model_validate_json(data)
        except pydantic.ValidationError as err:
            raise UnreadableVolumeRecord(path, "it is not JSON with a schema number") from err
        if head.version > SCHEMA:
            raise NewerVolumeRecord(path, head.version)
        try:
            return cls.model_validate_json(data)
        except pydantic.ValidationError as err:
            first = err.errors(include_input=False, include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise UnreadableVolumeRecord(path, f"{where}: {first['msg']}") from err

    def encode(self) -> bytes:
        """The record as one line of JSON."""
        return self.model_dump_json(by_alias=True).encode() + b"\n"

    def but(self, **changes: object) -> Self:
        """A checked copy with `changes`."""
        return type(self).model_validate({**self.model_dump(by_alias=True), **changes})


class _Head(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="ignore", strict=True)

    version: Annotated[int, pydantic.Field(alias="schema")]
