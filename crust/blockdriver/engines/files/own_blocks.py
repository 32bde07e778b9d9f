"""The blocks that a pool's volumes and snapshots have on their filesystem: its part of what statvfs(3) calls used.

    own        the bytes of volumes and snapshots, each byte once however many files share it: at least
    unseen     the bytes that may be in `own`: compressed parts, files with too many parts or that are not seen
    snapshots  the bytes of the snapshots, each once: at most

The used bytes beyond `own` are of others: other files, the filesystem's metadata, removed volumes that are not free
yet. A number that is too large would promise space that is not there, so blocks that are not seen count as others'. A
damaged file stops no other volume: an image that cannot be looked at is not in the numbers. A snapshot may share its
blocks with any volume, so while one cannot be looked at no block that a snapshot lacks counts as own.

Where the filesystem clones no files, no two files share a block, and st_blocks is the number. Elsewhere a clone and
its source are a *family*, from the clone on until the next start; a file without a family shares no block. The driver
knows each clone, because it makes it. At a start, and when a file is there that it did not make, it finds the
families by the parts that the filesystem names as shared (FIEMAP). btrfs counts in st_blocks what it has not
allocated yet; there each file is a family of its own, and what a volume shares is own only if a snapshot has it: a
write to a part of a shared extent takes new blocks, and frees none (`host.btrfs`). A file that was deleted shares its
blocks until a commit, so the look after it waits for one.

A look at the extents of a large family takes time: after it changed contents are estimated for a while. What took the
place of shared blocks counts as others' then. A snapshot causes no look: it adds what it does not share with the one
before it.

The numbers are kept. A call looks again only at what can have changed: the images that are attached, or were at the
last call, and what the driver makes, grows and removes. It looks at the extents of a family only if a file of it has
changed, by st_blocks and the times of the file; a member that was added or removed is such a change. A call looks at
all files if none did for `FULL_S`, for changes by hand.

No number is kept over a restart, and none depends on a record.
"""

import errno
import math
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from functools import partial

from crust.blockdriver.engines.files.directories import Directories, VolumeDirectories
from crust.blockdriver.host import btrfs, extents
from crust.core.volumes import VolumeId
from crust.host import answers
from crust.host.files.durable import Place

FULL_S = 15.0
_SHORT_S, _PAUSE_FACTOR = 0.02, 50
"""After a look at extents that took longer, changed contents of the family cause none for fifty times as long."""
_NO_NUMBER = 1 << 62
"""More than any filesystem has: how much a file has that cannot be looked at."""
_ABSENT = (errno.ENOENT,)
_BLOCK_BYTES = 512
"""The unit of st_blocks, whatever the filesystem's."""


@dataclass(frozen=True, slots=True)
class _File:
    """A file at one moment. A file that replaces it has another inode."""

    path: str
    is_snapshot: bool
    inode: int
    blocks_bytes: int
    changed_ns: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Counted:
    own_bytes: int = 0
    unseen_bytes: int = 0
    snapshot_bytes: int = 0

    @classmethod
    def sum_of(cls, numbers: Iterable["Counted"]) -> "Counted":
        return cls(*map(sum, zip(*map(astuple, numbers), strict=True)))


@dataclass(eq=False)
class _Family:
    """The ids of volumes and sets whose files may share blocks, and the numbers that count for them."""

    members: set[str]
    counted: Counted = Counted()
    seen: Counted = Counted()
    """What the last look at the extents of its files saw, and what committed sets have added since."""
    blocks_bytes: int = 0
    """The blocks of its files then, shared ones once for each file."""
    due_at_s: float = -math.inf
    """Before it changed contents cause no look."""


@dataclass(eq=False)
class OwnBlocks:
    """The blocks of the pool with these directories and sets. Safe from any thread."""

    _directories: VolumeDirectories
    _sets: Directories
    _attached: Callable[[], Iterable[str]]
    """Names the volumes that can be written to."""
    _clones: Callable[[], bool]
    """Whether files may share blocks."""
    _is_btrfs: Callable[[], bool]
    _guard: threading.Lock = field(default_factory=threading.Lock, init=False)
    _files: dict[str, tuple[_File, ...]] = field(default_factory=dict, init=False)
    _family_of: dict[str, _Family] = field(default_factory=dict, init=False)
    _full_at_s: float = field(default=-math.inf, init=False)
    _making: dict[str, Place] = field(default_factory=dict, init=False)
    """The directories of volumes and sets that are being made, by id."""
    _changing: Counter[str] = field(default_factory=Counter, init=False)
    """What may change now; and once more in the next call what may have changed."""
    _changed: set[str] = field(default_factory=set, init=False)
    _were_attached: set[str] = field(default_factory=set, init=False)
    _last_copy: dict[str, str] = field(default_factory=dict, init=False)
    """The file of each volume's last snapshot."""
    _added: dict[str, int] = field(default_factory=dict, init=False)
    """What sets have added to the bytes of snapshots since the last call."""
    _estimated: set[_Family] = field(default_factory=set, init=False)
    """The families that have changed since the last look at their extents."""
    _is_uncommitted: bool = field(default=True, init=False)
    """Whether a file of the pool may have been deleted since the last commit."""
    _unseen: set[str] = field(default_factory=set, init=False)
    """The volumes and sets that could not be looked at; the next call tries again."""

    def forget(self) -> None:
        """Know no file any more, as at a start."""
        with self._guard:
            for known in (self._files, self._family_of, self._last_copy, self._added):
                known.clear()
            self._estimated, self._full_at_s = set(), -math.inf
            self._is_uncommitted = True

    @contextmanager
    def changing(self, volume_or_set_id: str) -> Iterator[None]:
        """Look at a volume or set in each call, inside the block and once after it."""
        with self._guard:
            self._changing[volume_or_set_id] += 1
        try:
            yield
        finally:
            with self._guard:
                self._changing[volume_or_set_id] -= 1
                self._changing += Counter()  # without zeros
                self._changed.add(volume_or_set_id)

    @contextmanager
    def making(self, volume_or_set_id: str, home: Place) -> Iterator[None]:
        """Count what is being made in `home` as `own`, and not as snapshots; inside a block of `changing`."""
        with self._guard:
            self._making[volume_or_set_id] = home
            self._drop(volume_or_set_id)
            self._family_of[volume_or_set_id] = _Family({volume_or_set_id})
        try:
            yield
        finally:
            with self._guard:
                del self._making[volume_or_set_id]

    def join(self, volume_or_set_id: str, source_id: str) -> None:
        """Know that the first is about to get a copy of a file of the second."""
        with self._guard:
            family, joined = self._family_of.get(source_id), self._family_of.get(volume_or_set_id)
            if family is None or joined is None:
                self._full_at_s = -math.inf  # the next look finds the families
                self._family_of.pop(volume_or_set_id, None)
            elif family is not joined:
                family.members |= joined.members
                family.counted = Counted.sum_of((family.counted, joined.counted))
                family.seen = Counted.sum_of((family.seen, joined.seen))
                family.blocks_bytes += joined.blocks_bytes
                self._family_of.update(dict.fromkeys(joined.members, family))

    def count(self) -> Counted:
        """The numbers now. Raises `NotSeen` where the pool itself cannot be looked at."""
        with self._guard:
            self._look()
            families = set(self._family_of.values())
            total = Counted.sum_of([family.counted for family in families])
            if not self._unseen:
                return total
            own_bytes = total.own_bytes
            if not all(map(self._directories.is_id, self._unseen)):
                own_bytes = min(own_bytes, total.snapshot_bytes)
            return Counted(own_bytes, _NO_NUMBER, total.snapshot_bytes)

    def added_bytes(self, copies: Mapping[str, Place]) -> int:
        """The bytes that a set of snapshots with these files would add to `snapshots`: without those that another
        snapshot has. `copies` has a file for each volume: its image, or the copy of it. Raises `NotSeen`.

        A volume's blocks that its last snapshot lacks are in no earlier one.
        """
        if not self._clones():
            return sum(_blocks_bytes(file) for file in copies.values())
        pairs = [(self._last_copy.get(volume_id), file) for volume_id, file in copies.items()]
        known = [(last, file) for last, file in pairs if last is not None]
        if len(known) == len(copies):
            size = answers.ask(
                "the blocks since the last snapshots",
                lambda: sum(part.length for pair in known for part in extents.added(*pair)),
            )
            if isinstance(size, answers.Present):
                return size.value
        with self._guard:
            self._look()
            members = {
                one for of in copies if of in self._family_of for one in self._family_of[of].members
            }
            snapshots = [
                file for one in members for file in self._files.get(one, ()) if file.is_snapshot
            ]
        occupied = extents.Occupied()
        blocks_bytes = sum(_blocks_bytes(file) for file in copies.values())
        if not snapshots or not _add(occupied, [file.path for file in snapshots]):
            return blocks_bytes
        snapshot_bytes = occupied.most_bytes()
        if not _add(occupied, list(map(os.fspath, copies.values()))):
            return blocks_bytes
        return occupied.most_bytes() - snapshot_bytes

    def unshared_bytes(self, file: Place) -> int:
        """What a file shares with no other one; all of its blocks if that is not seen. Raises `NotSeen`."""
        occupied = extents.Occupied()
        seen = _add(occupied, (os.fspath(file),), shared=False)
        return occupied.most_bytes() if seen else _blocks_bytes(file)

    def commit(self, set_id: str, copies: Mapping[str, Place], added_bytes: int) -> None:
        """Know what a committed set of snapshots has added, with its files by volume."""
        with self._guard:
            self._last_copy.update(
                {volume_id: os.fspath(file) for volume_id, file in copies.items()}
            )
            self._added[set_id] = added_bytes

    def _look(self) -> None:
        """Look again at what can have changed. After an error the next call looks at everything."""
        attached = set(self._attached())
        full_at_s, self._full_at_s = self._full_at_s, -math.inf
        if time.monotonic() - full_at_s < FULL_S:
            again = self._changing.keys() | self._changed | self._were_attached | attached
        else:
            full_at_s = time.monotonic()
            sets, volumes = self._sets.ids(), self._directories.ids()
            kept = {
                one for one in sets if any(file.is_snapshot for file in self._files.get(one, ()))
            }
            again = {*volumes, *sets, *self._files, *self._making, *self._changed} - kept
        again |= self._unseen
        self._unseen = set()
        present: dict[str, tuple[_File, ...]] = {}
        for one in again:
            found = answers.ask(one, partial(self._files_of, one))
            if not isinstance(found, answers.Present):
                self._unseen.add(one)
            present[one] = found.value if isinstance(found, answers.Present) else ()
        changed = {one for one, files in present.items() if self._files.get(one, ()) != files}
        is_strange, new = False, changed - self._files.keys()
        for one, files in present.items():
            is_gone = one not in self._changing
            if files and one not in self._making:  # has the driver made these files?
                known = {file.inode for file in self._files.get(one, ())}
                is_new = one in self._changed | self._changing.keys()
                is_known = is_new or known == {file.inode for file in files}
                is_strange = is_strange or not is_known or one not in self._family_of
            if files:
                self._files[one] = files
            elif one in self._files or (is_gone and one in self._family_of):
                self._drop(one, is_gone=is_gone)
        self._count(self._find_families() if is_strange else self._to_look_at(changed, new))
        self._changed, self._were_attached, self._full_at_s = set(), attached, full_at_s

    def _files_of(self, volume_or_set_id: str) -> tuple[_File, ...]:
        """The files of a volume or set; of a set that is being made as those of a volume. Raises `NotSeen`."""
        home = self._making.get(volume_or_set_id)
        is_made, is_volume = home is None, self._directories.is_id(volume_or_set_id)
        if not is_made and not is_volume and self._clones():
            return ()  # a clone for a snapshot has no blocks of its own yet
        if is_made and is_volume:
            paths = [self._directories.image(VolumeId(volume_or_set_id))]
        else:
            home = home or self._sets.directory / volume_or_set_id
            listed = answers.ask(f"the blocks of {home}", partial(os.listdir, home), absent=_ABSENT)
            paths = [home / name for name in answers.seen(listed) or ()]
        files = (_look_at(path, is_snapshot=is_made and not is_volume) for path in paths)
        return tuple(file for file in files if file is not None)

    def _drop(self, volume_or_set_id: str, *, is_gone: bool = True) -> None:
        """Not count a volume or set any more. Until it `is_gone`, others may share its blocks."""
        self._files.pop(volume_or_set_id, None)
        family = self._family_of.get(volume_or_set_id)
        if family is not None:
            family.due_at_s = -math.inf
            self._estimated.add(family)
            if is_gone:
                self._family_of.pop(volume_or_set_id).members.discard(volume_or_set_id)
                self._is_uncommitted = True

    def _find_families(self) -> set[_Family]:
        groups: list[set[str]] = []
        self._family_of = {}  # after an error every file is strange
        if self._clones():
            shared = self._sharing(self._files)
            if not isinstance(shared, answers.Present):
                for one in tuple(self._files):
                    if not isinstance(self._sharing((one,)), answers.Present):
                        self._unseen.add(one)
                        del self._files[one]
                shared = self._sharing(self._files)
            id_of = {file.path: one for one, files in self._files.items() for file in files}
            groups = [{id_of[path] for path in group} for group in answers.seen(shared) or []]
        self._family_of = {one: _Family({one}) for one in (*self._files, *self._making)}
        for group in groups:  # a set with files of two groups joins them
            family = _Family(set().union(*(self._family_of[one].members for one in group)))
            self._family_of.update(dict.fromkeys(family.members, family))
        self._estimated = set()
        return set(self._family_of.values())

    def _sharing(self, ids: Iterable[str]) -> answers.Answer[list[set[str]]]:
        paths = [file.path for one in ids for file in self._files[one]]
        return answers.ask("shared blocks", lambda: extents.sharing(paths))

    def _to_look_at(self, changed: set[str], new: set[str]) -> set[_Family]:
        """The families whose extents are to be looked at now; the others that have changed are estimated."""
        due: set[_Family] = set()
        for one in changed & self._family_of.keys():
            family = self._family_of[one]
            if one in self._added:
                blocks_bytes = sum(file.blocks_bytes for file in self._files[one])
                family.blocks_bytes += blocks_bytes
                added = Counted(snapshot_bytes=self._added[one])
                family.seen = Counted.sum_of((family.seen, added))
                self._estimated.add(family)
            elif one in new:
                due.add(family)
            else:
                self._estimated.add(family)
        self._added.clear()
        now_s = time.monotonic()
        due |= {family for family in self._estimated if family.due_at_s <= now_s}
        self._estimated -= due
        # own blocks that took the place of shared ones since the last look count as others'
        for family in self._estimated:
            seen = family.seen
            files = (file for one in family.members for file in self._files.get(one, ()))
            blocks_bytes = sum(file.blocks_bytes for file in files)
            own_bytes = blocks_bytes - (family.blocks_bytes - seen.own_bytes)
            if self._is_btrfs():
                own_bytes = min(own_bytes, seen.own_bytes)
            own_bytes = max(own_bytes, 0)
            family.counted = Counted(own_bytes, blocks_bytes - own_bytes, seen.snapshot_bytes)
        return due

    def _count(self, families: Iterable[_Family]) -> None:
        for family in families:
            began_s = time.monotonic()
            if self._is_uncommitted:
                if self._is_btrfs():
                    btrfs.commit(self._directories.directory)
                self._is_uncommitted = False
            files = {file for one in family.members for file in self._files.get(one, ())}
            snapshots = {file for file in files if file.is_snapshot}
            own_bytes = family.blocks_bytes = sum(file.blocks_bytes for file in files)
            snapshot_bytes = sum(file.blocks_bytes for file in snapshots)
            unseen_bytes = 0
            if files and self._clones() and (len(files) > 1 or self._is_btrfs()):
                own_bytes, unseen_bytes = 0, own_bytes
                occupied = extents.Occupied()
                if _add(occupied, [file.path for file in snapshots]):
                    snapshot_bytes = occupied.most_bytes()
                    rest = [file.path for file in files - snapshots]
                    if _add(occupied, rest, shared=not self._is_btrfs()):
                        own_bytes = occupied.least_bytes()
                        unseen_bytes = occupied.most_bytes() - own_bytes
            family.seen = family.counted = Counted(own_bytes, unseen_bytes, snapshot_bytes)
            took_s = time.monotonic() - began_s
            family.due_at_s = began_s + (_PAUSE_FACTOR * took_s if took_s > _SHORT_S else 0)
            self._estimated.discard(family)


def _add(occupied: extents.Occupied, files: Iterable[str], *, shared: bool = True) -> bool:
    """Count files, or what they do not share; whether all were seen."""

    def add() -> None:
        for file in files:
            occupied.add(file, shared=shared)

    return isinstance(answers.ask("the blocks of files", add), answers.Present)


def _look_at(path: Place, *, is_snapshot: bool = False) -> _File | None:
    """The regular file at the path, if there is one. Raises `NotSeen`."""
    what = f"the blocks of {path}"
    status = answers.seen(answers.ask(what, lambda: os.lstat(path), absent=_ABSENT))
    if status is None or not stat.S_ISREG(status.st_mode):
        return None
    blocks_bytes = status.st_blocks * _BLOCK_BYTES
    changed_ns = (status.st_mtime_ns, status.st_ctime_ns)
    return _File(os.fspath(path), is_snapshot, status.st_ino, blocks_bytes, changed_ns)


def _blocks_bytes(path: Place) -> int:
    file = _look_at(path)
    return 0 if file is None else file.blocks_bytes
