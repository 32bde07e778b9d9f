"""The identity of the pool, and the ids of its volumes, snapshots and groups.

    <state dir>/pool.json        {"schema": 1, "pool_id": "…", "created": "…"}, written once, when the pool is created

    volume           <pool id>-<hash of the name>
    snapshot         <pool id>-snap-<hash of the name>
    group snapshot   <pool id>-group-<hash of the name>

An id names its pool, so a request for another one is known without a look at the disk. And it follows from the name,
so a retried create finds what it began, at any number of volumes and whatever was lost on the way. Names never become
file names (they may hold "/" and 128 bytes of anything), and an id of a request becomes one only if it has one of
these forms.

A pool that is not empty never gets a new identity: its volumes would become unknown.

    <run dir>/pool-id            the id of the pool that this node served last, since the boot

With the pool's disk unmounted its directory is an empty one on the root disk. Deletes would find nothing there and
answer OK, and new volumes would be made on the wrong disk. So a driver that served another pool since the boot does
not start.
"""

import datetime
import hashlib
import os
import re
import secrets
from dataclasses import dataclass
from typing import Annotated

import pydantic

from crust import errors, volumes
from crust.host.files import durable

SCHEMA = 1
_LIMIT_BYTES = 64 * 1024
_FOLDERS = ("records", "content", "images", "snapshots", "groups")
_SUFFIXES = (".json", ".img", ".snap")
_POOL_ID = r"[0-9a-f]{16}"
_ID = re.compile(rf"({_POOL_ID})-(snap-|group-|)[0-9a-f]{{40}}")


class PoolIdentityMissing(errors.Corrupt):
    """A pool that is not empty has no identity."""

    def __init__(self, path: str, found: str) -> None:
        super().__init__(
            f"the pool has no identity: {path} is missing",
            why=f"{found} exists, and a new identity would make the pool's volumes unknown",
            hint="restore the file from a backup, or set another state_dir",
        )
        self.path = path
        self.found = found


class PoolIdentityUnreadable(errors.Corrupt):
    """The file with the pool's identity cannot be read."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"the identity of the pool in {path} cannot be read",
            why=why,
            hint="restore the file from a backup, or run the version that wrote it",
        )
        self.path = path


class PoolAbsent(errors.PeerUnavailable):
    """The pool that this node served is not in its directory."""

    def __init__(self, directory: str, served: str, found: str, remembered: str) -> None:
        super().__init__(
            f"the pool {served} is not in {directory}",
            why=f"{found} is there; perhaps its disk is not mounted",
            hint=f"mount it and start again; if another pool is meant, remove {remembered} first",
        )
        self.served = served


class IdOfOtherPool(errors.NotFound):
    """The id in a request belongs to another pool."""

    def __init__(self, what: str, pool_id: str) -> None:
        super().__init__(
            f"there is no {what} here",
            why=f"its id names another pool, and this one is {pool_id}",
            hint="send the request to the driver that serves that pool",
        )
        self.pool_id = pool_id


class _Identity(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="allow", strict=True)

    version: Annotated[int, pydantic.Field(alias="schema")]
    pool_id: Annotated[str, pydantic.Field(pattern=rf"^{_POOL_ID}$")]
    created: str


@dataclass(frozen=True, slots=True)
class PoolIds:
    """The ids of one pool."""

    pool_id: str

    def volume_id(self, name: str) -> volumes.VolumeId:
        """The id of the volume called `name`."""
        return volumes.VolumeId(f"{self.pool_id}-{_digest(name)}")

    def snapshot_id(self, name: str) -> str:
        """The id of the snapshot called `name`."""
        return f"{self.pool_id}-snap-{_digest(name)}"

    def member_id(self, group_name: str, volume_id: str) -> str:
        """The id of a group's snapshot of a volume; no single snapshot can have it, because no name holds a NUL."""
        return self.snapshot_id("\0".join((group_name, volume_id)))

    def group_id(self, name: str) -> str:
        """The id of the group snapshot called `name`."""
        return f"{self.pool_id}-group-{_digest(name)}"

    def is_volume_id(self, text: str) -> bool:
        """Whether this pool could have a volume of that id."""
        return self._is_of_kind(text, "")

    def is_snapshot_id(self, text: str) -> bool:
        """Whether this pool could have a snapshot of that id."""
        return self._is_of_kind(text, "snap-")

    def is_group_id(self, text: str) -> bool:
        """Whether this pool could have a group snapshot of that id."""
        return self._is_of_kind(text, "group-")

    def check(self, text: str) -> None:
        """Raise `IdOfOtherPool` for an id of another pool.

        For calls that answer OK for an absent object: an object of another pool is not deleted.
        """
        found = _ID.fullmatch(text)
        if found is not None and found[1] != self.pool_id:
            raise IdOfOtherPool(text, self.pool_id)

    def _is_of_kind(self, text: str, kind: str) -> bool:
        found = _ID.fullmatch(text)
        return found is not None and found.groups() == (self.pool_id, kind)


class Pool:
    """The pool below a directory; its identity is known once it was opened."""

    def __init__(self, directory: str, run_dir: str) -> None:
        self._directory = directory
        self._remembered = os.path.join(run_dir, "pool-id")
        self._path = os.path.join(directory, "pool.json")
        self._ids: PoolIds | None = None

    @property
    def ids(self) -> PoolIds:
        """The pool's ids."""
        assert self._ids is not None, "the pool was not opened"
        return self._ids

    def open(self) -> None:
        """Read the identity; an empty directory becomes a new pool, durably. The directory must exist.

        Raises `PoolIdentityMissing`, `PoolIdentityUnreadable`, `PoolAbsent`.
        """
        durable.remove_temporary_files(self._directory)
        durable.make_directory(os.path.dirname(self._remembered), 0o700)
        try:
            identity = self._read()
        except errors.NotFound:
            self._check_empty()
            self._check_served("no pool")
            identity = self._make()
        self._check_served(identity.pool_id)
        self._ids = PoolIds(identity.pool_id)
        # A reboot ends what this protects: volumes that are published, and a CO that saw the driver serve.
        durable.publish(self._remembered, identity.pool_id.encode(), survives_power_cut=False)

    def _check_served(self, found: str) -> None:
        try:
            data = durable.read(self._remembered, limit_bytes=_LIMIT_BYTES)
        except errors.NotFound:
            return
        served = data.decode("ascii", "replace").strip()
        # Empty or cut off, it says nothing; it was replaced atomically, so somebody else wrote it.
        if re.fullmatch(_POOL_ID, served) and served != found:
            raise PoolAbsent(self._directory, served, found, self._remembered)

    def _read(self) -> _Identity:
        data = durable.read(self._path, limit_bytes=_LIMIT_BYTES)
        try:
            identity = _Identity.model_validate_json(data)
        except pydantic.ValidationError as err:
            first = err.errors(include_input=False, include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise PoolIdentityUnreadable(self._path, f"{where}: {first['msg']}") from err
        if identity.version > SCHEMA:
            why = f"it has schema {identity.version}, and this version knows schemas up to {SCHEMA}"
            raise PoolIdentityUnreadable(self._path, why)
        return identity

    def _check_empty(self) -> None:
        for folder in _FOLDERS:
            path = os.path.join(self._directory, folder)
            names = sorted(os.listdir(path)) if os.path.isdir(path) else []
            for name in names:
                if name.endswith(_SUFFIXES):
                    raise PoolIdentityMissing(self._path, os.path.join(path, name))

    def _make(self) -> _Identity:
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        identity = _Identity.model_validate(
            {"schema": SCHEMA, "pool_id": secrets.token_hex(8), "created": created}
        )
        durable.create(self._path, identity.model_dump_json(by_alias=True).encode() + b"\n")
        return identity


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:40]
