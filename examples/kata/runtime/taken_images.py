"""Which images this host has taken in their clusters, on disk: a file per virtual machine and volume.

    <directory>/<uuid of the VM>-<digest of the target path>.json

The file is there before the claim is made, and goes when the claim was given back. So a process that was killed
anywhere leaves a list for the next one, which gives back the images of virtual machines that have ended. It is no
part of a machine's directory, which goes with the machine, while its image may wait for a cluster that is away.
There is no key in it.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pydantic

from crust.core import errors, volumes
from crust.host.files import durable

_log = logging.getLogger(__name__)
_LIMIT_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Taken:
    """An image that a virtual machine may have."""

    vm_id: str
    sandbox: volumes.SandboxId
    target: volumes.TargetPath
    image: volumes.NetworkImage


class _Image(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)
    cluster: str
    pool: str
    namespace: str
    image: str
    monitors: tuple[str, ...]
    user: str


class _Taken(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)
    vm_id: str
    sandbox: str
    target: str
    image: _Image


class TakenImages:
    """The list. Everything blocks."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def add(self, taken: Taken) -> None:
        """Note it, durably; the same again succeeds."""
        image = {
            name: getattr(taken.image, name)
            for name in ("cluster", "pool", "namespace", "image", "monitors", "user")
        }
        plain = {
            "vm_id": taken.vm_id,
            "sandbox": taken.sandbox,
            "target": taken.target.text,
            "image": image,
        }
        durable.make_directory(self._directory, 0o700)
        durable.write_file(self._path(taken.vm_id, taken.target), json.dumps(plain).encode())

    def remove(self, vm_id: str, target: volumes.TargetPath) -> None:
        """It was given back; absent is a success."""
        path = self._path(vm_id, target)
        if path.exists():
            durable.remove(path)

    def all(self) -> Sequence[Taken]:
        """Everything that is noted; a file that cannot be read is logged, and kept."""
        taken = []
        for path in sorted(self._directory.glob("*.json")):
            try:
                taken.append(_parse(durable.read(path, limit_bytes=_LIMIT_BYTES)))
            except (errors.CrustError, ValueError) as error:
                _log.error("what is taken cannot be read", extra={"path": path, "error": error})
        return tuple(taken)

    def _path(self, vm_id: str, target: volumes.TargetPath) -> Path:
        digest = hashlib.sha256(target.text.encode()).hexdigest()[:20]
        return self._directory / f"{vm_id}-{digest}.json"


def _parse(data: bytes) -> Taken:
    note = _Taken.model_validate_json(data)
    image = volumes.NetworkImage(**note.image.model_dump())
    target = volumes.TargetPath(note.target)
    return Taken(note.vm_id, volumes.SandboxId(note.sandbox), target, image)
