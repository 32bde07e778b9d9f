"""The volumes that this node has: the CO's requests since boot, compared with the kernel.

One small JSON file per volume, below a directory named by the boot id: a reboot removes the mounts and makes all
files invalid. A file is replaced atomically but not synced. One process writes the files and caches them in memory.

    <run dir>/<boot id>/<volume id>.json    its schema number, its stage, and its publishes

The kernel is the truth: a file can be lost or stale. So the engine says whether a volume is attached, and mountinfo
whether it is mounted.

The driver notes a publish before its mount (`done` is False) and again after it; a crash in between leaves an entry
that a retry of the same publish completes and an unpublish removes. It keeps mount flags only after a check for
credentials, and the rest of a request only as a digest.

A file that cannot be read, or has another schema (`crust.blockdriver.schema`), blocks its volume only: the start goes
on. NodeUnpublish and NodeUnstage do not need it: they look at the kernel, as for a lost file, and the unstage removes
it. Only files *.json belong to the driver.

The node has slots: a volume has one while it is published to the node or attached there. A volume without a
ControllerPublishVolume gets its slot when it is attached. The limit is a setting (`max_volumes`).
"""

import logging
import os
import re
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Literal

import pydantic

from crust.blockdriver import schema
from crust.blockdriver.engines.pool_access import NodeAccess
from crust.blockdriver.host import device_mounts
from crust.blockdriver.records import models
from crust.blockdriver.records.records import Index
from crust.core import errors, volumes
from crust.host.files import durable, listing
from crust.host.mounts import mountinfo
from crust.host.process import syscalls

SCHEMA = 1
_LIMIT_BYTES = 64 * 1024
_log = logging.getLogger(__name__)
_BOOT = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class NodeNotFound(errors.NotFound):
    def __init__(self, node_id: str) -> None:
        super().__init__(
            f"there is no node {node_id!r}", why="this driver serves only the node that it runs on"
        )


class NotStaged(errors.NotReady):
    def __init__(self, volume_id: str, why: str = "") -> None:
        super().__init__(f"{volume_id} is not staged on this node", why=why)


class Staged(models.Part):
    """A volume that is attached and ready to be published. `paths` are the CO's staging paths."""

    volume_id: volumes.VolumeId
    kind: Literal["mount", "block"]
    fs_type: str
    paths: tuple[str, ...]
    host: Literal["", "image", "prepared"] = ""
    """`image`: the stage attached the volume for hypervisors; `prepared`: this host has prepared it since."""


class Published(models.Part):
    """A volume at a target. `fingerprint` is a digest of all arguments of the request (CSI: "P")."""

    volume_id: volumes.VolumeId
    target: str
    kind: Literal["mount", "block"]
    fs_type: str
    mode: int
    options: tuple[str, ...]
    readonly: bool
    deferred: bool
    fingerprint: str
    done: bool
    pod: str = ""
    """Its namespace and name, where the CO says them."""


class NodeFile(models.Part):
    version: Annotated[int, pydantic.Field(alias="schema")] = SCHEMA
    stage: Staged | None = None
    publishes: tuple[Published, ...] = ()


_NOTHING = NodeFile()


def read_all(boot: str) -> Iterator[tuple[str, NodeFile | Exception]]:
    """The volumes of a boot's directory, each with its file, or the error why that cannot be read. No change."""
    for path in listing.matching(boot, "*.json"):
        file: NodeFile | Exception
        try:
            data = durable.read(path, limit_bytes=_LIMIT_BYTES)
            file = schema.read(NodeFile.model_validate_json, data, SCHEMA)
        except (schema.Unreadable, errors.CrustError) as err:
            file = err
        yield path.stem, file


@dataclass(eq=False)
class NodeState:
    """The volumes of this boot, in the run directory, and their attachments by the engine's `access`.

    Safe to use from several threads; one call per volume at a time changes its file.
    """

    _root: str
    access: NodeAccess
    _boot: str = field(default="", init=False)
    _guard: threading.Lock = field(default_factory=threading.Lock, init=False)
    _files: dict[str, NodeFile | Exception] = field(default_factory=dict, init=False)
    """By volume, the last written file at the end; or the error why it cannot be read."""

    def open(self, boot_id: str) -> None:
        """Create the directories, remove files of other boots, read those of this one."""
        self._boot = os.path.join(self._root, boot_id)
        durable.make_directories(self._root, 0o700)
        durable.make_directory(self._boot, 0o700)
        durable.remove_temporary_files(self._boot)
        with syscalls.translating(f"cannot clear {self._root}"), os.scandir(self._root) as entries:
            for boot in entries:
                ours = _BOOT.fullmatch(boot.name) and boot.is_dir(follow_symlinks=False)
                if not ours or boot.path == self._boot:
                    continue
                try:
                    with syscalls.translating(f"cannot remove {boot.path}"):
                        for path in listing.matching(boot.path, "*.json"):
                            path.unlink()
                        if not os.listdir(boot.path):
                            os.rmdir(boot.path)
                except errors.CrustError as err:
                    # no code reads it, and the next start tries again
                    extra = {"path": boot.path, "error": err}
                    _log.warning("the node state of another boot stays", extra=extra)
        self._files = dict(read_all(self._boot))
        for volume_id, file in self._files.items():
            if isinstance(file, Exception):
                extra = {"path": self._path(volume_id), "error": file}
                _log.error("an entry of the node state cannot be read", extra=extra)

    def of(self, volume_id: volumes.VolumeId) -> NodeFile:
        """The stage and the publishes of a volume. Raises UnreadableEntry."""
        with self._guard:
            file = self._files.get(volume_id, _NOTHING)
        if isinstance(file, NodeFile):
            return file
        why = (file.why or file.what) if isinstance(file, errors.CrustError) else str(file)
        raise errors.Corrupt.named(
            "UnreadableEntry",
            f"the node state entry {self._path(volume_id)} cannot be read",
            why=why,
        ) from file

    def unreadable(self, volume_id: volumes.VolumeId) -> str:
        """The path of the volume's file if it cannot be read, else empty."""
        with self._guard:
            is_readable = isinstance(self._files.get(volume_id, _NOTHING), NodeFile)
        return "" if is_readable else self._path(volume_id)

    def published(self, target: volumes.TargetPath) -> Published | None:
        """The publish at a target, of any volume with a readable file: of two the one noted last."""
        with self._guard:
            files = [file.publishes for file in self._files.values() if isinstance(file, NodeFile)]
        at_target = [publish for publish in chain(*files) if publish.target == target.text]
        return at_target[-1] if at_target else None

    def note_staged(self, entry: Staged) -> None:
        volume_id = entry.volume_id
        self._write(volume_id, self.of(volume_id).model_copy(update={"stage": entry}))

    def note_published(self, entry: Published) -> None:
        volume_id = entry.volume_id
        file = self.of(volume_id)
        others = tuple(publish for publish in file.publishes if publish.target != entry.target)
        self._write(volume_id, file.model_copy(update={"publishes": (*others, entry)}))

    def forget_published(self, volume_id: volumes.VolumeId, target: volumes.TargetPath) -> None:
        """Remove a publish; absent is a success."""
        file = self.of(volume_id)
        others = tuple(publish for publish in file.publishes if publish.target != target.text)
        if others != file.publishes:
            self._write(volume_id, file.model_copy(update={"publishes": others}))

    def forget_staged(self, volume_id: volumes.VolumeId) -> None:
        """Remove a volume's file, with its publishes; absent is a success."""
        if not self._boot:  # a controller alone has no node, and its container's root is read-only
            return
        # The file first: an entry removed only from memory would be back after a restart, and block the volume.
        durable.remove(self._path(volume_id), survives_power_cut=False)
        with self._guard:
            self._files.pop(volume_id, None)

    def staging_paths(self, volume_id: volumes.VolumeId) -> tuple[str, ...]:
        """The staging paths of the volume; empty if it is not staged; its file's own path if that cannot be read."""
        unreadable = self.unreadable(volume_id)
        if unreadable:
            return (unreadable,)
        staged = self.of(volume_id).stage
        return () if staged is None else staged.paths

    def live_publishes(self, volume_id: volumes.VolumeId) -> tuple[Published, ...]:
        """The publishes of the volume that exist: a deferred publish by its entry, any other by its mount."""
        entries = self.of(volume_id).publishes
        if all(entry.deferred for entry in entries):
            return entries
        attachment = self.access.host_device(volume_id)
        device = attachment.device if attachment else None
        live = []
        for entry in entries:
            mount = None if entry.deferred else mountinfo.at(entry.target)
            is_mounted = mount and device and device_mounts.shows(mount, device)
            if entry.deferred or is_mounted:
                live.append(entry)
        return tuple(live)

    def deferred_targets(self, volume_id: volumes.VolumeId) -> tuple[volumes.TargetPath, ...]:
        entries = self.of(volume_id).publishes
        return tuple(volumes.TargetPath(entry.target) for entry in entries if entry.deferred)

    def _write(self, volume_id: volumes.VolumeId, file: NodeFile) -> None:
        data = file.model_dump_json(by_alias=True).encode() + b"\n"
        try:
            durable.write_file(self._path(volume_id), data, survives_power_cut=False)
        except errors.Exhausted:  # what ends must end on a full /run too
            if not durable.shorten(self._path(volume_id), data):
                raise
        with self._guard:
            self._files.pop(volume_id, None)
            self._files[volume_id] = file

    def _path(self, volume_id: str) -> str:
        return f"{self._boot}/{volume_id}.json"


@dataclass(slots=True)
class AttachSlots:
    """Gives slots, for all pools, to one caller at a time, so that two volumes cannot both take the last one."""

    _node_id: str
    limit: int
    pools: list[tuple[Index, NodeAccess]] = field(default_factory=list, init=False)
    """Both sources answer from memory: a pool that is away keeps its slots."""
    _guard: threading.Lock = field(default_factory=threading.Lock, init=False)
    _coming: set[volumes.VolumeId] = field(default_factory=set, init=False)

    def in_use(
        self, node_id: str, ids: Collection[str] = ()
    ) -> tuple[int, tuple[volumes.VolumeId, ...]]:
        """The node's limit, and the volumes that have a slot now: from the first moment of a publish or attach.

        The caller compares the limit with the volumes that it knows. If it does not read the list, it sends their
        `ids`: then the limit is less by the volumes that it does not know. Raises `NodeNotFound` for another node.
        """
        if node_id != self._node_id:
            raise NodeNotFound(node_id)
        with self._guard:
            occupied = self._occupied()
        unknown = occupied.difference(ids) if ids else ()
        return max(self.limit - len(unknown), 1), tuple(sorted(occupied))

    def _occupied(self) -> set[volumes.VolumeId]:
        """The volumes that have a slot; the caller holds the guard, so no volume is between the three sources."""
        occupied = set(self._coming)
        for index, access in self.pools:
            occupied.update(index.on_node(self._node_id), access.attached_here())
        return occupied

    @contextmanager
    def taking(self, volume_id: volumes.VolumeId) -> Iterator[None]:
        """Hold a slot for a volume until its publish or attach has ended. Raises `AttachLimitReached`."""
        with self._guard:
            occupied = self._occupied()
            if volume_id not in occupied and len(occupied) >= self.limit:
                raise errors.Exhausted.named(
                    "AttachLimitReached",
                    f"no more volumes can be published to {self._node_id}",
                    why=f"its attach limit of {self.limit} is reached",
                )
            self._coming.add(volume_id)
        try:
            yield
        finally:
            with self._guard:
                self._coming.discard(volume_id)
