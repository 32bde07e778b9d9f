"""Kata's own record of a volume: <base64url of the mount's source>/mountInfo.json below direct-volumes.

Kata reads it while it creates a container (docs/decisions/0037). The placeholder names a device that does not exist,
so both of Kata's runtimes refuse the container. If a directory had no file, the Go runtime would share the host's
directory: so the directory appears by one rename, and a rename replaces the file, from a directory beside it (Kata
reads a second file in an entry as a sandbox's id). Only a keeper (`grants`) puts the real record there. Any other
entry is foreign, even if Kata made it, and crust neither uses nor changes it.

Crust writes only values that both runtimes read in the same way: strings, no null, "ro" among the options.
"""

import base64
import contextlib
import enum
import hashlib
import json
import logging
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from crust.core import errors, volumes
from crust.handoff.entry import DirectoryReader
from crust.handoff.record import Record
from crust.handoff.store import Store
from crust.handoff.watch import RENAMES, Watch
from crust.host.files import durable
from crust.host.process import syscalls, workers

_log = logging.getLogger(__name__)

KEY_BYTES_MAX = 189
"""The longest mount source: in base64 a longer one exceeds the 255 bytes of a file name."""

_FILE = "mountInfo.json"
_TYPE = "directvol"
_LIMIT_BYTES = 64 * 1024
_NO_DEVICE = "/dev/crust-no-device-until-claimed/"


class Kind(enum.Enum):
    """The kinds of entries at a name."""

    ABSENT = "absent"
    PLACEHOLDER = "placeholder"
    REAL = "real"
    FOREIGN = "foreign"


def name_of(key: str) -> str:
    """The entry's name for a mount's source, byte for byte as Kata gets it. Raises `KataPathTooLong`."""
    data = os.fsencode(key)
    if len(data) > KEY_BYTES_MAX:
        raise errors.NotReady.named(
            "KataPathTooLong",
            f"the volume at {key} cannot be given to Kata",
            why=f"the path has {len(data)} bytes, and Kata's directory takes {KEY_BYTES_MAX}",
        )
    return base64.urlsafe_b64encode(data).decode("ascii")


def real(record: Record) -> bytes:
    """The content that names the device."""
    mount, group = record.mount, record.mount.group
    metadata = {}
    if group is not None and not record.readonly:  # the agent fails where it may not change a file
        metadata = {"fsGroup": str(group.gid), "fsGroupChangePolicy": group.policy.value}
    options = ["ro", *mount.mount_options] if record.readonly else [*mount.mount_options]
    return _bytes(os.path.realpath(record.device), mount.fs_type, metadata, options)


def placeholder(record: Record) -> bytes:
    """The content that names the volume's digest in place of a device."""
    return _bytes(f"{_NO_DEVICE}{record.digest}", record.mount.fs_type, {}, [])


@dataclass(frozen=True, slots=True)
class KataEntries:
    """Kata's directory at `root`. Functions block, for microseconds: the directory is on a tmpfs."""

    root: str

    def open(self) -> None:
        """Make the directory and the one beside it, if they are absent."""
        for path in (self.root, self._aside):
            durable.make_directories(path, 0o700)

    @property
    def _aside(self) -> str:
        return f"{self.root}.crust"

    def file(self, name: str) -> str:
        """The path of the entry's file, which Kata reads."""
        return f"{self.root}/{name}/{_FILE}"

    def kind(self, name: str, record: Record) -> Kind:
        """The kind of the entry at the name, compared with the record."""
        content = self._read(self.file(name))
        if content is None:
            with syscalls.translating(f"cannot list {self.root}/{name}"):
                try:
                    return Kind.FOREIGN if os.listdir(f"{self.root}/{name}") else Kind.ABSENT
                except FileNotFoundError:
                    return Kind.ABSENT
                except NotADirectoryError:
                    return Kind.FOREIGN
        if content.get("device") == f"{_NO_DEVICE}{record.digest}":
            return Kind.PLACEHOLDER
        expected = json.loads(real(record))
        keys = ("volume-type", "device", "fstype", "options")  # a group may have changed since
        return Kind.REAL if all(content.get(key) == expected[key] for key in keys) else Kind.FOREIGN

    def place(self, name: str, record: Record) -> Kind:
        """Make the placeholder if the name is free; returns the kind from before. Raises `KataEntryForeign`."""
        kind = self.kind(name, record)
        if kind is Kind.FOREIGN:
            raise errors.Conflict.named(
                "KataEntryForeign",
                f"the volume at {record.target} cannot be given to Kata",
                why=f"{self.root}/{name} is not crust's: another program made an entry for this path",
            )
        if kind is not Kind.ABSENT:
            return kind
        staging = f"{self._aside}/{secrets.token_hex(8)}"
        with syscalls.translating(f"cannot make Kata's entry for {record.target}"):
            os.mkdir(staging, 0o700)
            durable.write_file(f"{staging}/{_FILE}", placeholder(record), survives_power_cut=False)
            os.rename(staging, f"{self.root}/{name}")
        return kind

    def staged(self, name: str, record: Record) -> tuple[str, str]:
        """The real file and the placeholder that follows it, ready to be renamed. Each name has one pair."""
        new, back = self._pair(name)
        durable.write_file(new, real(record), survives_power_cut=False)
        durable.write_file(back, placeholder(record), survives_power_cut=False)
        return new, back

    def hide(self, name: str, record: Record) -> None:
        """Replace the file by the placeholder. The caller holds the record's claim lock."""
        _, back = self.staged(name, record)
        with syscalls.translating(f"cannot change Kata's entry for {record.target}"):
            os.rename(back, self.file(name))

    def remove(self, name: str) -> None:
        """Remove an entry's directory, with the ids of sandboxes that Kata left in it."""
        aside = f"{self._aside}/{secrets.token_hex(8)}"
        with syscalls.translating(f"cannot remove Kata's entry {name}"):
            os.rename(f"{self.root}/{name}", aside)
            for file in os.listdir(aside):
                os.unlink(f"{aside}/{file}")
            os.rmdir(aside)
        for path in self._pair(name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def ours(self) -> Iterator[tuple[str, str]]:
        """Names of crust's entries, and the digest of the target that each is for."""
        for name in self.names():
            content = self._read(self.file(name)) or {}
            if content.get("volume-type") != _TYPE:
                continue
            if not str(content.get("device")).startswith(_NO_DEVICE):
                content = self._read(self._pair(name)[1]) or {}  # ours only if its follower waits
            device = str(content.get("device"))
            if device.startswith(_NO_DEVICE):
                yield name, device.removeprefix(_NO_DEVICE)

    def real_ones(self, records: Callable[[], Iterable[Record]]) -> Iterator[tuple[str, Record]]:
        """Names with the real entry of a record, also where the name is an alias of its target.

        `records` is called if an entry names a device: mostly all are placeholders.
        """
        contents = {name: self._read(self.file(name)) or {} for name in self.names()}
        devices = {name: str(content.get("device")) for name, content in contents.items()}
        named = {name: path for name, path in devices.items() if not path.startswith(_NO_DEVICE)}
        if not named:
            return
        by_device = {os.path.realpath(record.device): record for record in records()}
        for name, path in named.items():
            record = by_device.get(path)
            if record is not None and self.kind(name, record) is Kind.REAL:
                yield name, record

    def names(self) -> list[str]:
        """All names, also of foreign entries."""
        with syscalls.translating(f"cannot list {self.root}"):
            return os.listdir(self.root)

    def _pair(self, name: str) -> tuple[str, str]:
        stem = f"{self._aside}/{hashlib.sha256(name.encode()).hexdigest()}"
        return f"{stem}.real", f"{stem}.placeholder"

    def _read(self, path: str) -> dict[str, Any] | None:
        """The content; None if there is no file, or one that cannot be crust's. Raises the errors of the kernel."""
        try:
            content = json.loads(durable.find(path, limit_bytes=_LIMIT_BYTES) or b"null")
        except (durable.UnreadableFile, durable.UntrustedFile, ValueError, RecursionError):
            return None
        except syscalls.FileInTheWay:  # in the place of the directory
            return None
        return content if isinstance(content, dict) else None


@dataclass(eq=False)
class Placeholders:
    """A placeholder in Kata's directory for each volume that is published to one of our handlers.

    It appears with crust's entry, and is removed after it. In between Kata refuses a container, also while this
    daemon is away. An entry that stays, because the daemon was away at the unpublish, is harmless: its path has the
    pod's UID, and the first look removes it. A real one stays where keepers and virtual machine were killed together.
    """

    _store: Store
    _entries: KataEntries
    _handlers: Collection[volumes.HandlerName]
    _report: Callable[[str, errors.CrustError | None], None]
    _known: frozenset[str] | None = None

    def __post_init__(self) -> None:
        self._reader = DirectoryReader(self._store.layout)

    async def keep(self) -> None:
        """Look until cancelled."""
        async with Watch(self._store.root, kinds=RENAMES) as watch:  # a claim is a touch
            async for _ in watch:
                await workers.run(self.look_at_volumes)

    def look_at_volumes(self) -> None:
        """Look once. Blocks."""
        look = self._reader.look()
        for volume in look.entries.values():
            record = volume.record
            if record is None or record.handler not in self._handlers:
                continue
            problem: errors.CrustError | None = None
            try:
                self._entries.place(name_of(record.target.text), record)
            except errors.CrustError as error:
                _log.error("Kata's entry was not made", extra={"error": error})
                problem = error
            self._report(f"volume {record.target}", problem)
        if self._known is None or self._known - look.names:
            made = list(self._entries.ours())
            published = self._reader.look().names  # after them: an entry is made after its record
            for name, digest in made:
                if digest not in published:
                    self._entries.remove(name)
        self._known = frozenset(look.names)


def _bytes(device: str, fs_type: str, metadata: dict[str, str], options: list[str]) -> bytes:
    plain = {
        "volume-type": _TYPE,
        "device": device,
        "fstype": fs_type,
        "metadata": metadata,
        "options": options,
    }
    return json.dumps(plain, separators=(",", ":")).encode()
