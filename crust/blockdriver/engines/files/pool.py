"""The pool in a directory: its identity, and the right to write it.

    <state dir>/pool.json        {"schema": 4, "pool_id": "…", "created": "…"}, written once, when the pool is created
    <state dir>/driver.lock      held by the one process that writes the pool

With the pool's disk unmounted its directory is an empty directory of the root disk. A delete would find no volume
there and answer OK, and a create would make its volume on the wrong disk. So the driver makes a pool once, on
request, and never in a directory that is not empty. It keeps the id of the pool outside of it, over reboots:

    <state dir>.pool-id          the id of the pool that this node serves, or the file that the settings name

The driver reads the schema first, and opens no pool of an unknown one (`UnknownPoolLayout`): it would find none of
its volumes, and answer that each is absent. It opens a pool of schema 3, in which one key of `pool.json` more had a
meaning, and leaves it one, for the way back. Schema 1 had the folders records, content, images and groups; schema 2
did not record who may parse a content. For the same reason the driver opens no pool beside a folder that it does not
know and that is not empty, whatever `pool.json` says.

The driver serves no volume if the pool is absent or has another id. It reaches all files of the pool by way of the
opened directory and folders (`HeldDirectory`), so a later mount over one gets no write. It serves no volume with a
mount over a folder: the folder's volumes would seem to be lost. For the same reason a process that has served a
folder accepts no other folder in its place, and makes none, as long as `pool.json` is the same file.
"""

import datetime
import os
import re
import secrets
from typing import Annotated

import pydantic

from crust.blockdriver import schema
from crust.blockdriver.engines.pool_access import POOL_ID, PoolAbsent, PoolIds, UnknownPoolLayout
from crust.core import errors
from crust.host.files import durable, locks
from crust.host.files.durable import DirectoryReplaced, HeldDirectory
from crust.host.process import syscalls

SCHEMA = 4
_BEFORE = 3
_LIMIT_BYTES = 64 * 1024
_FOLDERS = ("volumes", "snapshots")
_OTHERS = ("lost+found",)
"""Folders of the pool's filesystem, which no layout of a pool has."""


class PoolIdentityUnreadable(errors.Corrupt):
    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"the identity of the pool in {path} cannot be read", why=why)


class _Identity(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="allow", strict=True)

    version: Annotated[int, pydantic.Field(alias="schema")]
    pool_id: Annotated[str, pydantic.Field(pattern=rf"^{POOL_ID}$")]
    created: str


class DirectoryPool:
    """The pool in a directory; its identity is known once it was opened.

    `memory` is the file with the id of the pool that this node serves. With `create` a first start makes a pool.
    """

    ids: PoolIds
    """From `open` on. The driver serves no volume before."""

    def __init__(self, directory: str, memory: str, *, create: bool = False) -> None:
        self.directory = HeldDirectory(directory)
        self.shown = directory
        self._memory = memory
        self._create = create
        self._identity = self.directory / "pool.json"
        self._served: dict[str, tuple[int, ...]] = {}
        """The identities of the opened folders, by name; by "" the identity of `pool.json`."""
        self._lock: locks.ProcessLock | None = None

    def find(self) -> None:
        """Hold the directory if the right pool is in it, or if a new pool may be made there; writes no file.

        Raises `PoolAbsent`, `PoolIdentityMissing`, `PoolIdentityUnreadable`, `UnknownPoolLayout`.
        """
        try:
            if self._create and not self._remembered():
                durable.make_directories(self.directory.path, 0o700)
            try:
                self.directory.hold()
            except errors.NotFound as err:
                raise self._absent("no directory") from err
            identity, remembered = self._read(), self._remembered()
            if identity is None:
                self._check_empty()
                if remembered or not self._create:
                    raise self._absent("no pool.json")
            elif remembered not in ("", identity.pool_id):
                raise self._absent(f"the pool {identity.pool_id}")
            with (
                syscalls.translating(f"cannot list {self.shown}"),
                os.scandir(self.directory / ".") as entries,
            ):
                unknown = [
                    entry.name
                    for entry in entries
                    if entry.name not in (*_FOLDERS, *_OTHERS)
                    and not entry.name.startswith(".")
                    and entry.is_dir(follow_symlinks=False)
                    and os.listdir(entry)
                ]
            if unknown:  # it may hold the volumes of another layout
                raise UnknownPoolLayout(
                    self.shown,
                    f"{self.directory / min(unknown)} is not empty, and no folder of this version",
                    "run the version of crust that wrote it; if it is not of the pool, move it elsewhere",
                )
        except errors.CrustError:
            self.directory.let_go()
            raise

    def open(self) -> None:
        """Read the identity, or make the pool with `create`, and keep its id. Durable. Raises as `find` does,
        `FolderMountedOver`, and `DirectoryReplaced` for a folder that was moved away since it was opened.
        """
        self.find()
        durable.remove_temporary_files(self.directory / ".")
        identity = self._read()
        if identity is None:
            created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            identity = _Identity.model_validate(
                {"schema": SCHEMA, "pool_id": secrets.token_hex(8), "created": created}
            )
            data = identity.model_dump_json(by_alias=True).encode() + b"\n"
            durable.write_file(self._identity, data, replaces=False)
        if self._remembered() != identity.pool_id:
            durable.write_file(self._memory, identity.pool_id.encode() + b"\n")
        self.ids = PoolIds(identity.pool_id)
        # written once: a pool that was restored from a backup has another file, and other folders
        written = os.stat(self._identity)
        file = written.st_dev, written.st_ino, written.st_ctime_ns
        if self._served.setdefault("", file) != file:
            self._served = {"": file}
        for name in _FOLDERS:
            folder = self.directory / name
            try:
                self.directory.hold_folder(name)
            except errors.NotFound as err:
                if name in self._served:
                    raise DirectoryReplaced(str(folder)) from err
                durable.make_directory(folder, 0o700)
                self.directory.hold_folder(name)
            status = os.stat(folder)
            held = status.st_dev, status.st_ino
            if self._served.setdefault(name, held) != held:
                raise DirectoryReplaced(str(folder))
            durable.remove_temporary_files(folder)
            # A killed process may have left names unsynced, and the driver relies on them from now on.
            durable.sync_directory(folder)
        durable.sync_directory(self.directory / ".")

    def check_in_place(self) -> None:
        """Raise `PoolAbsent` unless the opened directory is still at its path; `DirectoryReplaced` for a folder."""
        try:
            self.directory.check_in_place()
        except DirectoryReplaced as err:
            if err.path != self.directory.path:
                raise
            raise self._absent("another directory, or none,") from err

    def lock(self) -> None:
        """Take the lock of the one process that writes the pool, until `let_go`. Raises `locks.LockHeld`."""
        self._lock = locks.ProcessLock.acquire(self.directory / "driver.lock")

    def renew(self) -> None:
        """No work: the kernel frees the lock of a process that has ended."""

    def let_go(self) -> None:
        """Release directory and lock, so that an operator can unmount the filesystem."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        self.directory.let_go()

    def _absent(self, present: str) -> PoolAbsent:
        remembered, other = self._remembered(), "for a new pool run `crust driver init-pool`"
        if remembered:
            other = f"if another pool is meant, remove {self._memory}"
        return PoolAbsent(
            f"the pool{f' {remembered}' if remembered else ''} is not in {self.directory.path}",
            why=f"{present} is there; perhaps its disk is not mounted",
            hint=f"unmount what is there instead, mount it, and the driver goes on by itself; {other}",
        )

    def _remembered(self) -> str:
        """The id of the pool that this node serves; empty if it never served one."""
        data = durable.find(self._memory, limit_bytes=_LIMIT_BYTES)
        if data is None:
            return ""
        remembered = data.decode("ascii", "replace").strip()
        if not re.fullmatch(POOL_ID, remembered):
            raise PoolIdentityUnreadable(self._memory, "it does not hold the id of a pool")
        return remembered

    def _read(self) -> _Identity | None:
        path = str(self._identity)
        data = durable.find(self._identity, limit_bytes=_LIMIT_BYTES)
        if data is None:
            return None
        try:
            return schema.read(_Identity.model_validate_json, data, _BEFORE, SCHEMA)
        except schema.OtherSchema as err:
            raise UnknownPoolLayout(self.shown, f"{path}: {err}") from err
        except schema.Unreadable as err:
            raise PoolIdentityUnreadable(path, str(err)) from err

    def _check_empty(self) -> None:
        for folder in _FOLDERS:
            path = self.directory / folder
            with syscalls.translating(f"cannot list {path}"):
                try:  # a link is no absent folder, wherever it leads
                    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                except FileNotFoundError:
                    continue
                with syscalls.closing(fd):
                    names = os.listdir(fd)
            if names:
                raise errors.Corrupt.named(
                    "PoolIdentityMissing",
                    f"the pool has no identity: {self._identity!s} is missing",
                    why=f"{path / min(names)!s} exists, and a new identity would make the pool's volumes unknown",
                )
