"""The objects inside mountInfo.json (`crust.handoff.record`), and the reservation by a record of any version.

The models are strict, and the docstrings of their fields are part of the contract (specs/mountInfo.schema.json).
"""

from dataclasses import dataclass
from inspect import isclass
from typing import Annotated, Literal, get_args

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, field_validator

from crust.core import volumes

SCHEMA = 1
"""The version that this code writes, and the newest that it reads."""

TEXT_MAX = 500
"""Characters of a text for people."""

_INT64 = 2**63 - 1

Gid = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,9}$")]
Id = Annotated[str, Field(min_length=1, max_length=512)]
Handler = Annotated[str, Field(min_length=1, max_length=63, pattern=rf"^{volumes.HANDLER_NAME}$")]
_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$"
FsType = Annotated[str, Field(min_length=1, max_length=32, pattern=_NAME)]
AbsolutePath = Annotated[
    str, Field(min_length=2, max_length=volumes.PATH_MAX_BYTES - 1, pattern=r"^/")
]
CephName = Annotated[str, Field(min_length=1, max_length=255, pattern=_NAME)]
"""A name that needs no quoting in a configuration file of Ceph or in a command."""


class Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, hide_input_in_errors=True)


class Identity(Model):
    """Identifies the device independently of its path: diskseq changes with every attach (kernel 5.15 and later)."""

    major: Annotated[int, Field(ge=0, lt=2**12)]
    minor: Annotated[int, Field(ge=0, lt=2**20)]
    disk_sequence: Annotated[int, Field(ge=0, le=_INT64)]


class Metadata(Model):
    """The allowed keys of KEP-2857's and Kata's metadata. Other keys are refused: they could hold secrets."""

    model_config = ConfigDict(extra="forbid")

    fs_group: Annotated[Gid | None, Field(alias="fsGroup")] = None
    """Decimal gid, 1 to 4294967294. Not applied to a read-only volume."""
    change_policy: Annotated[
        Literal["Always", "OnRootMismatch"] | None, Field(alias="fsGroupChangePolicy")
    ] = None
    """Allowed only with fsGroup. Default: OnRootMismatch."""


class Limits(Model):
    """Upper limits of the guest's I/O, per second; 0 is no limit. The hypervisor enforces them."""

    read_iops: Annotated[int, Field(ge=0, le=_INT64)] = 0
    write_iops: Annotated[int, Field(ge=0, le=_INT64)] = 0
    read_bytes_per_second: Annotated[int, Field(ge=0, le=_INT64)] = 0
    write_bytes_per_second: Annotated[int, Field(ge=0, le=_INT64)] = 0


class Format(Model):
    """The volume was created empty: the kernel that mounts makes the filesystem if the device is blank."""

    ext4_bytes_per_inode: Annotated[int, Field(ge=4096, le=2**26)] | None = None
    """Has an effect for ext4 only, as the next key."""
    ext4_reserved_percent: Annotated[int, Field(ge=0, le=50)] | None = None


class Image(Model):
    """An image of a Ceph cluster (RBD), which the hypervisor opens itself. The key of its user is in no file."""

    cluster: Annotated[str, Field(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")]
    """The cluster's id (fsid)."""
    pool: CephName
    namespace: Annotated[str, Field(max_length=255, pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]*)?$")]
    """Empty: the pool's default namespace."""
    image: CephName
    monitors: Annotated[
        tuple[Annotated[str, Field(max_length=512, pattern=r"^[A-Za-z0-9._:,/\[\]-]+$")], ...],
        Field(min_length=1, max_length=64),
    ]
    """Addresses in the form of `mon_host`."""
    user: CephName
    """Without "client."."""


class CrustPart(Model):
    """The fields that only crust uses."""

    model_config = ConfigDict(extra="allow")

    schema_version: Annotated[Literal[1], Field(alias="schema")]
    """A reader refuses an unknown version."""
    driver: Id
    volume_id: Id
    target_path: AbsolutePath
    """Exactly as the CO sent it; the entry's name is its SHA-256."""
    handler: Handler
    """The runtime handler that the volume is published to."""
    readonly: bool
    identity: Identity | None = None
    """REQUIRED for a block device; an image on the network has none."""
    image: Image | None = None
    """The image, if `volume-type` is "network"; then `required` names it."""
    capacity_bytes: Annotated[int, Field(ge=0, le=_INT64)]
    generation: Annotated[int, Field(ge=1, le=_INT64)]
    """The record's generation: increases by one with every rewrite."""
    content_generation: Annotated[int, Field(ge=0, le=_INT64)]
    """The content's generation: changes when the driver creates, formats or restores the volume."""
    published_at: AwareDatetime
    limits: Limits | None = None
    """Absent: no limits."""
    decided_by: Annotated[str, Field(max_length=TEXT_MAX)] | None = None
    """The source of the decision to defer the volume, for people."""
    request_id: Annotated[str, Field(pattern=r"^[0-9A-Za-z-]{1,64}$")] | None = None
    """The id of the call that published the volume, as in the logs of all processes."""
    traceparent: (
        Annotated[str, Field(pattern=r"^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$")] | None
    ) = None
    """The span of that call (W3C Trace Context). A runtime that traces continues the trace with it."""
    request: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """SHA-256 of the CO's own parts of the request, as the proxy computes it. Absent: not known."""
    pod: Annotated[str, Field(max_length=TEXT_MAX)] | None = None
    """`namespace/name` of the pod that the volume was published for, for people; absent where the CO does not say."""
    format: Format | None = None
    """Absent: nobody makes a filesystem."""
    encryption: Literal["luks"] | None = None
    """The filesystem is inside a LUKS container. Its key is in no file."""
    required: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] | None = None
    """Keys of this object that a reader must know, e.g. "limits" or "limits.burst"; else it refuses the record."""

    @field_validator("required")
    @classmethod
    def _knows_required(cls, paths: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for path in paths or ():
            if not _is_known(cls, path):
                raise ValueError(
                    f"crust.{path} must be understood, and this version does not know it"
                )
        return paths


def _is_known(model: type[BaseModel], path: str) -> bool:
    name, _, below = path.partition(".")
    field = next((f for key, f in model.model_fields.items() if name in (key, f.alias)), None)
    if field is None or not below:
        return field is not None
    kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if isclass(kind)]
    return any(issubclass(kind, BaseModel) and _is_known(kind, below) for kind in kinds)


class _ReservedPart(BaseModel):
    """The keys whose meaning no version changes (H-41)."""

    driver: Id
    volume_id: Id
    target_path: Annotated[str, Field(min_length=1)]
    identity: Identity | None = None
    image: Image | None = None
    readonly: bool = False


class _ReservedEnvelope(BaseModel):
    crust: _ReservedPart


@dataclass(frozen=True, slots=True)
class Reserved:
    """The reservation by a record of any version. `device` is None if only the volume is known."""

    key: volumes.VolumeKey
    target: volumes.TargetPath
    device: volumes.DeviceIdentity | volumes.NetworkImage | None
    readonly: bool


def reserved(data: bytes, digest: str) -> Reserved | None:
    """The reservation by the unreadable record of the entry `digest`; None if its bytes do not say it."""
    try:
        part = _ReservedEnvelope.model_validate_json(data).crust
    except ValidationError:
        return None
    target = volumes.TargetPath(part.target_path)
    if target.digest != digest:
        return None
    device: volumes.DeviceIdentity | volumes.NetworkImage | None = None
    if part.image is not None:
        device = volumes.NetworkImage(**part.image.model_dump())
    elif part.identity is not None:
        device = volumes.DeviceIdentity(**part.identity.model_dump())
    key = volumes.VolumeKey(volumes.DriverName(part.driver), volumes.VolumeId(part.volume_id))
    return Reserved(key, target, device, part.readonly)
