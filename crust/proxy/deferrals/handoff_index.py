"""What the proxy knows of the handoff directory, in memory: each entry as it was last read or written.

Every scan of the directory returns what it read, entry by entry. What the proxy itself has written since that scan
began is newer, so the index keeps it, and the next scan reads it again. So a scan neither waits for publishes nor has
to be repeated.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from crust import errors, volumes
from crust.handoff.entry import Entry, UnknownHandoffFile
from crust.handoff.record import Record
from crust.host.block import device_sets
from crust.proxy.deferrals.reservations import Reservation

_Key = volumes.VolumeKey | device_sets.Key
"""What two reservations may have in common; then they are compared."""


@dataclass(frozen=True, slots=True)
class Known:
    """An entry, and what it reserves; None if that cannot be known."""

    entry: Entry
    reservation: Reservation | None


class HandoffIndex:
    """The entries by name, target, volume and device."""

    def __init__(self) -> None:
        self._known: dict[str, Known] = {}
        self._by_target: dict[str, Record] = {}
        self._sharing: dict[_Key, dict[str, Reservation]] = defaultdict(dict)
        self._unknown: set[str] = set()
        self._clock = 0
        self._written: dict[str, int] = {}

    def now(self) -> int:
        """The time by the proxy's own changes; give it to `apply` after a look that begins now."""
        return self._clock

    def written(self, digest: str, known: Known | None) -> None:
        """The proxy has written an entry, or removed it (None)."""
        self._clock += 1
        self._written[digest] = self._clock
        self._set(digest, known)

    def apply(self, began: int, there: Set[str], read: Mapping[str, Known]) -> tuple[str, ...]:
        """Store what a look has read of the entries that are there; returns the names that were written
        meanwhile, to be read again.
        """
        newer = {digest for digest, written in self._written.items() if written > began}
        self._written = {digest: self._written[digest] for digest in newer}
        for digest in self._known.keys() - there - newer:
            self._drop(digest)
        for digest in read.keys() - newer:
            self._set(digest, read[digest])
        return tuple(newer)

    def get(self, digest: str) -> Known | None:
        """The entry of this name."""
        return self._known.get(digest)

    def record_at(self, target: str) -> Record | None:
        """The readable record of a target path."""
        return self._by_target.get(target)

    def error_at(self, target: str) -> errors.CrustError | None:
        """Why the entry of a target path cannot be read; None if it can, or there is none."""
        known = self._known.get(volumes.TargetPath(target).digest)
        return None if known is None else known.entry.error

    def records(self) -> tuple[Record, ...]:
        """Every readable record."""
        return tuple(self._by_target.values())

    def unknown(self) -> Iterator[str]:
        """The directories of entries that may be anybody's: neither record nor reservation can be read."""
        return (self._known[digest].entry.directory for digest in self._unknown)

    def entries(self) -> tuple[Entry, ...]:
        """Every entry by name, unreadable ones included."""
        return tuple(self._known[digest].entry for digest in sorted(self._known))

    def states(self) -> Mapping[tuple[str, str], int]:
        """How many entries of which driver are in which state. Any thread may ask."""
        return Counter(_driver_and_state(each.entry) for each in tuple(self._known.values()))

    def reserved(self) -> int:
        """How many entries reserve a device. Any thread may ask."""
        return sum(each.reservation is not None for each in tuple(self._known.values()))

    def sharing(self, keys: Iterable[_Key]) -> Iterator[Reservation]:
        """The reservations that have one of these keys."""
        for key in keys:
            if key in self._sharing:
                yield from self._sharing[key].values()

    def _set(self, digest: str, known: Known | None) -> None:
        self._drop(digest)
        if known is not None:
            self._put(digest, known)

    def _put(self, digest: str, known: Known) -> None:
        self._known[digest] = known
        if known.entry.record is not None:
            self._by_target[known.entry.record.target.text] = known.entry.record
        elif known.reservation is None and not isinstance(known.entry.error, UnknownHandoffFile):
            self._unknown.add(digest)
        for key in keys_of(known.reservation):
            self._sharing[key][digest] = known.reservation  # type: ignore[assignment]

    def _drop(self, digest: str) -> None:
        known = self._known.pop(digest, None)
        if known is None:
            return
        self._unknown.discard(digest)
        if known.entry.record is not None:
            del self._by_target[known.entry.record.target.text]
        for key in keys_of(known.reservation):
            del self._sharing[key][digest]
            if not self._sharing[key]:
                del self._sharing[key]


def _driver_and_state(entry: Entry) -> tuple[str, str]:
    if entry.record is None:
        return "", "unreadable"
    claim = entry.claim if entry.live else None
    return entry.record.key.driver, claim.state.value if claim else "published"


def keys_of(reservation: Reservation | None) -> frozenset[_Key]:
    """What another reservation must have in common with this one to be compared with it."""
    if reservation is None:
        return frozenset()
    related = reservation.devices.related if reservation.devices is not None else frozenset()
    return frozenset({reservation.key, *related})
