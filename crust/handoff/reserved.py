"""What an entry reserves, in a small file of its own: known also when the record beside it cannot be read.

A record is unreadable when it was damaged, or when a newer version wrote it. Its volume and device must stay reserved
all the same, and nobody else must be blocked. So the proxy writes this file before the record. Its format is one line
of JSON whose keys never change their meaning; a reader ignores other keys. Without the file (it was lost too) the
record is tried, as far as any version's record can be understood.
"""

from dataclasses import asdict, dataclass
from typing import Annotated

import pydantic

from crust.core import errors, volumes
from crust.handoff import mount_info
from crust.handoff.layout import EntryPaths
from crust.handoff.record import LIMIT_BYTES, Record
from crust.host.files import durable


@dataclass(frozen=True, slots=True)
class Reserved:
    """A volume, its target and its device. `identity` is None if only the volume is known."""

    key: volumes.VolumeKey
    target: volumes.TargetPath
    identity: volumes.DeviceIdentity | None
    readonly: bool
    image: str = ""
    """`NetworkImage.identity`, if it is an image."""


class _Part(pydantic.BaseModel):
    """The keys that this file and the object "crust" of every version's record have."""

    driver: mount_info.Id
    volume_id: mount_info.Id
    target_path: Annotated[str, pydantic.Field(min_length=1)]
    identity: mount_info.Identity | None = None
    readonly: bool = False
    image: mount_info.Image | None = None


class _Envelope(pydantic.BaseModel):
    crust: _Part


def to_bytes(record: Record) -> bytes:
    """The file's content for a record."""
    source = record.mount.source
    there = (
        {"image": asdict(source)}
        if isinstance(source, volumes.NetworkImage)
        else {"identity": source.identity.numbers()}
    )
    plain = {
        "driver": record.key.driver,
        "volume_id": record.key.volume_id,
        "target_path": record.target.text,
        **there,
        "readonly": record.readonly,
    }
    return mount_info.one_line(plain)


def read(paths: EntryPaths) -> Reserved | None:
    """What an entry reserves whose record cannot be read; None if that cannot be known either."""
    for path, model in ((paths.reserved, _Part), (paths.record, _Envelope)):
        try:
            found = model.model_validate_json(durable.read(path, limit_bytes=LIMIT_BYTES))
        except (errors.CrustError, pydantic.ValidationError):
            continue
        part = found.crust if isinstance(found, _Envelope) else found
        assert isinstance(part, _Part)
        reserved = _of(part)
        if reserved.target.digest == paths.digest:
            return reserved
    return None


def _of(part: _Part) -> Reserved:
    found = part.identity
    identity = (
        volumes.DeviceIdentity(found.major, found.minor, found.disk_sequence) if found else None
    )
    return Reserved(
        volumes.VolumeKey(volumes.DriverName(part.driver), volumes.VolumeId(part.volume_id)),
        volumes.TargetPath(part.target_path),
        identity,
        part.readonly,
        volumes.NetworkImage(**part.image.model_dump()).identity if part.image else "",
    )
