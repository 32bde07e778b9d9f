"""mountInfo.json as it lies on disk: the pydantic model, strict, nothing extra, and its JSON schema.

The outer keys are those of KEP-2857 and of Kata's direct volumes, so that either can read a record; what only
crust needs is in the object "crust". There is no free-form map in it, so there is no place where a secret could
hide: metadata has two allowed keys, and options pass `crust.mount_options`.

specs/mountInfo.schema.json is generated from it (`make proto`), so the words under the fields are the contract's.
"""

import json
from typing import Annotated, Literal, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, model_validator

from crust import errors, mount_options, volumes

SCHEMA = 1
"""The version this code writes, and the newest that it reads."""

_UINT32 = 2**32 - 1
_INT64 = 2**63 - 1

Gid = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,9}$")]
Id = Annotated[str, Field(min_length=1, max_length=512)]
Handler = Annotated[
    str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")
]
FsType = Annotated[
    str, Field(min_length=1, max_length=32, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")
]
AbsolutePath = Annotated[
    str, Field(min_length=2, max_length=volumes.PATH_MAX_BYTES - 1, pattern=r"^/")
]


class _Model(BaseModel):
    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )


class Identity(_Model):
    """Which device it is, whatever its path says: diskseq changes with every attach (kernel 5.15 and later)."""

    major: Annotated[int, Field(ge=0, lt=2**12)]
    minor: Annotated[int, Field(ge=0, lt=2**20)]
    disk_sequence: Annotated[int, Field(ge=0, le=_INT64)]


class Metadata(_Model):
    """KEP-2857's and Kata's metadata, as far as it is allowed here."""

    fs_group: Annotated[Gid | None, Field(alias="fsGroup")] = None
    """Decimal gid, 1 to 4294967294. Not applied to a read-only volume."""
    change_policy: Annotated[
        Literal["Always", "OnRootMismatch"] | None, Field(alias="fsGroupChangePolicy")
    ] = None
    """Only with fsGroup; Always if it is absent."""

    @model_validator(mode="after")
    def _policy_needs_group(self) -> Self:
        if self.change_policy is not None and self.fs_group is None:
            raise ValueError("fsGroupChangePolicy without fsGroup")
        if self.fs_group is not None and int(self.fs_group) >= _UINT32:
            raise ValueError("fsGroup is above 4294967294")
        return self


class Limits(_Model):
    """What the guest may do at most, per second; 0 is no limit. The hypervisor sees to it."""

    read_iops: Annotated[int, Field(ge=0, le=_INT64)] = 0
    write_iops: Annotated[int, Field(ge=0, le=_INT64)] = 0
    read_bytes_per_second: Annotated[int, Field(ge=0, le=_INT64)] = 0
    write_bytes_per_second: Annotated[int, Field(ge=0, le=_INT64)] = 0


class CrustPart(_Model):
    """What crust keeps beyond the keys of others."""

    schema_version: Annotated[Literal[1], Field(alias="schema")]
    """A reader refuses a version that it does not know."""
    driver: Id
    volume_id: Id
    target_path: AbsolutePath
    """Exactly as the CO sent it; the entry's name is its SHA-256."""
    handler: Handler
    """The runtime handler for which the volume is meant."""
    readonly: bool
    identity: Identity
    capacity_bytes: Annotated[int, Field(ge=0, le=_INT64)]
    generation: Annotated[int, Field(ge=1, le=_INT64)]
    """Of the record: one more with every rewrite."""
    content_generation: Annotated[int, Field(ge=0, le=_INT64)]
    """Of the volume's content: changes when something other than its users' writes replaced it."""
    published_at: AwareDatetime
    limits: Limits | None = None
    """Absent: none."""


class MountInfo(_Model):
    """mountInfo.json."""

    volume_type: Annotated[Literal["block"], Field(alias="volume-type")]
    device: AbsolutePath
    """The block device's path on the host; `crust.identity` says whether it is still the one that was meant."""
    fs_type: Annotated[FsType, Field(alias="fstype")]
    metadata: Metadata = Metadata()
    options: tuple[Annotated[str, Field(min_length=1, max_length=4096)], ...] = ()
    """For the kernel that mounts; "ro" is among them exactly if the volume is read-only."""
    crust: CrustPart

    @model_validator(mode="after")
    def _options_are_fit(self) -> Self:
        if ("ro" in self.options) != self.crust.readonly:
            raise ValueError("options and crust.readonly disagree about 'ro'")
        words = tuple(word for word in self.options if word != "ro")
        try:
            fit = mount_options.for_guest(words)
        except errors.InvalidRequest as err:
            raise ValueError(
                err.what
            ) from None  # names the option; a value must not get into a traceback
        if fit.options != words:
            raise ValueError("options hold words that are not for a guest's kernel")
        return self


class _SchemaOnly(BaseModel):
    schema_version: Annotated[int, Field(alias="schema")]


class Envelope(BaseModel):
    """As much of a record as tells its schema version, whoever wrote it."""

    crust: _SchemaOnly

    @property
    def is_newer(self) -> bool:
        """Whether the record is of a version that this code does not know."""
        return self.crust.schema_version > SCHEMA


def json_schema() -> str:
    """The JSON schema of mountInfo.json, as text that ends in a newline."""
    schema = MountInfo.model_json_schema(by_alias=True)
    return (
        json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2)
        + "\n"
    )
