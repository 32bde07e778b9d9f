"""The volumes that this driver has staged and published on this node since boot.

One small JSON file per staged volume and per target, below a directory named by the boot id: a reboot removes the
mounts and makes all entries invalid. Files are replaced atomically but not synced. One process writes them and caches
them in memory. The kernel is the truth: every caller compares with mountinfo.

    <run dir>/<boot id>/staged/<volume id>.json
    <run dir>/<boot id>/published/<sha256 of the target path>.json

An entry is written before its mount (`done` is False) and again after it; a crash in between leaves an entry that a
retry of the same publish completes and an unpublish removes. Mount flags are kept only after a check for credentials,
the rest of a request only as a digest.

An entry that cannot be read blocks its volume or target only: the start goes on. Its file name says which one it is,
and every volume whose id occurs in its bytes is blocked as well. NodeUnpublish and NodeUnstage do not need it: they
look at the kernel, as for an entry that was lost, and remove it. Other files than *.json are not ours.
"""

import logging
import os
import re
import threading
from collections.abc import Callable
from typing import Literal, TypeVar

import pydantic

from crust.blockdriver.records import models
from crust.core import errors, volumes
from crust.host.files import durable
from crust.host.process import oserrors

_LIMIT_BYTES = 64 * 1024
_log = logging.getLogger(__name__)
_BOOT = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class UnreadableEntry(errors.Corrupt):
    """An entry of the node state cannot be read, so what it blocks is neither staged, published, copied nor grown."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"the node state entry {path} cannot be read",
            why="it is not an entry of this version of the driver",
            hint="unpublish and unstage the volume, which removes the entry; or remove the file and start again",
        )
        self.path = path


class Staged(pydantic.BaseModel):
    """A volume that is attached and ready to be published. `paths` are the CO's staging paths."""

    model_config = models.PART

    volume_id: str
    kind: Literal["mount", "block"]
    fs_type: str
    paths: tuple[str, ...]
    host: Literal["", "image", "prepared"] = ""
    """Of a volume that the stage attached for hypervisors (`image`): whether this host has prepared it since."""


class Published(pydantic.BaseModel):
    """A volume at a target. `fingerprint` is a digest of all arguments of the request (CSI: "P")."""

    model_config = models.PART

    volume_id: str
    target: str
    kind: Literal["mount", "block"]
    fs_type: str
    mode: int
    options: tuple[str, ...]
    readonly: bool
    deferred: bool
    fingerprint: str
    done: bool

    @property
    def access_mode(self) -> volumes.AccessMode:
        """The access mode as a value."""
        return volumes.AccessMode(self.mode)


E = TypeVar("E", Staged, Published)


class NodeState:
    """The entries of this boot. Safe to use from several threads."""

    def __init__(self, run_dir: str) -> None:
        self._root = run_dir
        self._boot = ""
        self._guard = threading.Lock()
        self._staged: dict[str, Staged] = {}
        self._published: dict[str, Published] = {}
        self._unreadable: dict[str, bytes] = {}
        """The bytes of each file that cannot be read, as far as they can, by its path."""

    def open(self, boot_id: str) -> None:
        """Create the directories, remove entries of other boots, read those of this one."""
        self._boot = os.path.join(self._root, boot_id)
        durable.make_directory(self._root, 0o700)
        durable.make_directory(self._boot, 0o700)
        for name in ("staged", "published"):
            durable.make_directory(os.path.join(self._boot, name), 0o700)
            durable.remove_temporary_files(os.path.join(self._boot, name))
        self._drop_other_boots()
        self._unreadable = {}
        self._staged = self._read("staged", Staged, lambda entry: entry.volume_id)
        self._published = self._read("published", Published, lambda entry: entry.target)

    def staged(self, volume_id: volumes.VolumeId) -> Staged | None:
        """The stage of a volume. Raises `UnreadableEntry`."""
        with self._guard:
            self._check_readable(self._staged_path(volume_id))
            return self._staged.get(volume_id)

    def unreadable_stage(self, volume_id: volumes.VolumeId) -> str:
        """The path of the volume's stage if it cannot be read, else empty."""
        path = self._staged_path(volume_id)
        with self._guard:
            return path if path in self._unreadable else ""

    def is_published_readable(self, target: volumes.TargetPath) -> bool:
        """Whether `published` can answer."""
        with self._guard:
            return self._published_path(target.text) not in self._unreadable

    def published(self, target: volumes.TargetPath) -> Published | None:
        """The entry of a target. Raises `UnreadableEntry`."""
        with self._guard:
            self._check_readable(self._published_path(target.text))
            return self._published.get(target.text)

    def published_of(self, volume_id: volumes.VolumeId) -> tuple[Published, ...]:
        """All entries of a volume. Raises `UnreadableEntry` if one that cannot be read mentions it."""
        with self._guard:
            for path, data in self._unreadable.items():
                if path.startswith(self._directory("published")) and volume_id.encode() in data:
                    raise UnreadableEntry(path)
            return tuple(each for each in self._published.values() if each.volume_id == volume_id)

    def note_staged(self, entry: Staged) -> None:
        """Record a stage."""
        durable.publish(
            self._staged_path(entry.volume_id), _encode(entry), survives_power_cut=False
        )
        with self._guard:
            self._staged[entry.volume_id] = entry

    def forget_staged(self, volume_id: volumes.VolumeId) -> None:
        """Remove a stage; absent is a success."""
        # The file first: an entry removed only from memory would be back after a restart, and block the volume for
        # good.
        durable.remove(self._staged_path(volume_id), survives_power_cut=False)
        with self._guard:
            self._staged.pop(volume_id, None)
            self._unreadable.pop(self._staged_path(volume_id), None)

    def note_published(self, entry: Published) -> None:
        """Record a publish."""
        durable.publish(
            self._published_path(entry.target), _encode(entry), survives_power_cut=False
        )
        with self._guard:
            self._published[entry.target] = entry

    def forget_published(self, target: volumes.TargetPath) -> None:
        """Remove a publish; absent is a success."""
        durable.remove(self._published_path(target.text), survives_power_cut=False)
        with self._guard:
            self._published.pop(target.text, None)
            self._unreadable.pop(self._published_path(target.text), None)

    def _check_readable(self, path: str) -> None:
        if path in self._unreadable:
            raise UnreadableEntry(path)

    def _directory(self, name: str) -> str:
        return os.path.join(self._boot, name)

    def _staged_path(self, volume_id: str) -> str:
        return f"{self._boot}/staged/{volume_id}.json"

    def _published_path(self, target: str) -> str:
        return f"{self._boot}/published/{volumes.TargetPath(target).digest}.json"

    def _read(self, name: str, model: type[E], key: Callable[[E], str]) -> dict[str, E]:
        directory = os.path.join(self._boot, name)
        entries: dict[str, E] = {}
        for file_name in sorted(each for each in os.listdir(directory) if each.endswith(".json")):
            path = os.path.join(directory, file_name)
            data = b""
            try:
                data = durable.read(path, limit_bytes=_LIMIT_BYTES)
                entry = model.model_validate_json(data)
            except (pydantic.ValidationError, errors.CrustError) as err:
                _log.error(
                    "an entry of the node state cannot be read", extra={"path": path, "error": err}
                )
                self._unreadable[path] = data
            else:
                entries[key(entry)] = entry
        return entries

    def _drop_other_boots(self) -> None:
        with (
            oserrors.translating(f"cannot clear {self._root} of earlier boots"),
            os.scandir(self._root) as entries,
        ):
            for boot in entries:
                ours = _BOOT.fullmatch(boot.name) and boot.is_dir(follow_symlinks=False)
                if ours and boot.path != self._boot:
                    try:
                        _remove_boot(boot.path)
                    except OSError as err:  # nobody reads it, and the next start tries again
                        extra = {"path": boot.path, "error": err}
                        _log.warning("the node state of another boot stays", extra=extra)


def _remove_boot(path: str) -> None:
    """Remove the entries of another boot, and nothing else."""
    for name in ("staged", "published"):
        directory = os.path.join(path, name)
        if not os.path.isdir(directory):
            continue
        for file_name in os.listdir(directory):
            os.unlink(os.path.join(directory, file_name))
        os.rmdir(directory)
    if not os.listdir(path):
        os.rmdir(path)


def _encode(entry: pydantic.BaseModel) -> bytes:
    return entry.model_dump_json().encode() + b"\n"
