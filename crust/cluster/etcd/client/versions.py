"""Which holes of etcd's access control a version has. With one of them a node that was taken over is not kept to its
own directory; a node that only errs is.

Sources: etcd's changelogs and security advisories, by the names below. Lines of versions that are not in a row end
with the last one that is: an older line has the hole, a newer one has not.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hole:
    """What can be done, and the first version of each line that prevents it; None for a line that never did."""

    name: str
    what: str
    fixed: tuple[tuple[tuple[int, int], int | None], ...]

    def is_in(self, version: tuple[int, int, int]) -> bool:
        """Whether the version has it."""
        line, patch = version[:2], version[2]
        for known, first in self.fixed:
            if line == known:
                return first is None or patch < first
        return line < self.fixed[-1][0]


HOLES = (
    Hole(
        "CVE-2026-33343",
        "any client reads and writes every key by a transaction within a transaction",
        (((3, 4), 42), ((3, 5), 28), ((3, 6), 9)),
    ),
    Hole(
        "GHSA-xg4h-6gfc-h4m8",
        "a client watches the keys of all others from a key of its own on",
        (((3, 4), None), ((3, 5), 33), ((3, 6), 14)),
    ),
    Hole(
        "CVE-2026-33413",
        "any client ends leases, compacts, and raises alarms that stop all writes",
        (((3, 4), 42), ((3, 5), 28), ((3, 6), 9)),
    ),
    Hole(
        "CVE-2026-44283",
        "a transaction's puts read previous values, and attach leases, without permission",
        (((3, 4), 44), ((3, 5), 30), ((3, 6), 11)),
    ),
)


def parse(version: str) -> tuple[int, int, int] | None:
    """The numbers of a version, e.g. of "3.4.23"; None if it is none."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def holes(version: str) -> tuple[Hole, ...]:
    """The holes that a version has; of one that cannot be read, all."""
    numbers = parse(version)
    return tuple(hole for hole in HOLES if numbers is None or hole.is_in(numbers))
