"""Counts what is wrong after a run, from what lies on the disks, in Ceph and in etcd; uses no code of crust.

    python -m tests.support.cluster_chaos.checker DIRECTORY

It reads the journals of the callers, the files of the pools, RBD by librbd and librados (`found`), and the keys of
etcd, which the caller lists in `places.json`. It knows the formats from the documents: an id ends with the first 40
digits of the SHA-256 of its name.
"""

import hashlib
import json
import mmap
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.cluster_chaos import found
from tests.support.cluster_chaos.found import StoredObject

BLOCK_BYTES = 1024
_CLAIMED = "has it since"
"""In what a writer is told that is refused because of another one's claim."""
KINDS = (
    "volumes lost",
    "snapshots lost",
    "names in two places",
    "names answered with two ids",
    "deleted, and there again",
    "nobody asked for it",
    "without an answer at the end",
    "record without image",
    "image without record",
    "name without image in Ceph",
    "kept image of a deleted volume without snapshots",
    "record not ready",
    "data lost",
    "another image than was answered",
    "smaller than it was grown to",
    "stamps of two sessions mixed",
    "acknowledged stamps lost",
    "writer beside another node's",
    "placement of nothing",
    "volume without placement",
    "placement in another pool",
    "requests left in etcd",
    "images left in Ceph's trash",
)


@dataclass(slots=True)
class Name:
    """The last word on a name, of a volume or a snapshot."""

    id: str = ""
    state: str = "asked"
    marks: list[str] = field(default_factory=list)
    size: int = 0
    identity: str | None = None
    """Which image it was when it was answered; None if nobody has looked."""


class Checker:
    """Finds and counts."""

    def __init__(self, base: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.checked: Counter[str] = Counter()
        self.lines: list[str] = []
        self._base = base
        self._places: dict[str, Any] = json.loads((base / "places.json").read_text())

    def run(self) -> None:
        """Count everything."""
        names = self._names()
        local = {node: found.in_pool(Path(path)) for node, path in self._places["pools"].items()}
        places = {**local, "ceph": self._ceph()}
        self._check_names(names, places)
        self._check_stored(names, places)
        self._check_etcd(local)

    def _wrong(self, kind: str, what: str) -> None:
        assert kind in KINDS
        self.counts[kind] += 1
        self.lines.append(f"{kind}: {what}")

    def _names(self) -> dict[str, Name]:
        """By the digest of the name, with "snap-" before a snapshot's and the engine before both."""
        names: dict[str, Name] = {}
        for line in _lines(self._base / "journal.jsonl"):
            key = _key(line["engine"], line["event"], line["name"])
            name = names.setdefault(key, Name())
            if line["event"] in ("create", "snapshot"):
                names[key] = Name(name.id if name.state == "there" else "")
            elif line["event"] in ("created", "snapshotted") and name.id not in ("", line["id"]):
                self._wrong("names answered with two ids", line["name"])
            _heard(names[key], line)
        return names

    def _check_names(
        self, names: dict[str, Name], places: dict[str, dict[str, StoredObject]]
    ) -> None:
        for key, name in names.items():
            kind = "snapshots" if "snap-" in key else "volumes"
            there = [
                (place, id_)
                for place, things in places.items()
                for id_ in things
                if _key_of(place, id_) == key
            ]
            self.checked[f"{kind} that must be {name.state}"] += 1
            if name.state in ("asked", "deleting"):
                self._wrong("without an answer at the end", key)
            if len(there) > 1:
                self._wrong("names in two places", f"{key}: {there}")
            if name.state == "there" and name.id not in {id_ for _, id_ in there}:
                self._wrong(f"{kind} lost", f"{name.id}, found {there}")
            if name.state == "gone" and there:
                self._wrong("deleted, and there again", f"{key}: {there}")
            for place, id_ in there:
                self._check_data(name, places[place][id_], id_)

    def _check_data(self, name: Name, stored: StoredObject, id_: str) -> None:
        if name.state != "there":
            return
        if name.identity is not None:
            self.checked["images that must be the ones that were answered"] += 1
            if stored.identity != name.identity:
                what = f"{id_}: {stored.identity!r}, and it was {name.identity!r}"
                self._wrong("another image than was answered", what)
        if stored.size < name.size:
            self._wrong("smaller than it was grown to", id_)
        for mark in name.marks:
            self.checked["marks in local volumes"] += 1
            if stored.path is None or not _has(stored.path, mark.encode()):
                self._wrong("data lost", id_)

    def _check_stored(
        self, names: dict[str, Name], places: dict[str, dict[str, StoredObject]]
    ) -> None:
        for place, things in places.items():
            for id_, stored in things.items():
                self.checked[f"found in {place}"] += 1
                if _key_of(place, id_) not in names:
                    self._wrong("nobody asked for it", f"{place}: {id_}")
                if stored.record is None:
                    self._wrong("image without record", f"{place}: {id_}")
                    continue
                if stored.size == 0:
                    self._wrong("record without image", f"{place}: {id_}")
                if stored.record["phase"] != "ready":
                    self._wrong("record not ready", f"{place}: {id_} {stored.record['phase']}")

    def _check_etcd(self, local: dict[str, dict[str, StoredObject]]) -> None:
        ids = {_digest_key(id_): id_ for things in local.values() for id_ in things}
        placed = self._places["placements"]
        for key, pool in placed.items():
            if key not in ids:
                self._wrong("placement of nothing", key)
            elif not ids[key].startswith(pool):
                self._wrong("placement in another pool", f"{key} {pool} {ids[key]}")
        for key in set(ids) - set(placed):
            self._wrong("volume without placement", ids[key])
        self.checked["placements"] = len(placed)
        for key in self._places["requests"]:
            self._wrong("requests left in etcd", key)

    def _ceph(self) -> dict[str, StoredObject]:
        """Volumes and snapshots of the namespace; the stamps are checked on the way."""
        if "ceph.conf" not in self._places:
            return {}
        ceph = found.Ceph(*(self._places[f"ceph.{each}"] for each in ("conf", "pool", "namespace")))
        for each in found.trash(ceph):
            self._wrong("images left in Ceph's trash", each)
        return found.in_ceph(ceph, self._wrong, self._check_stamps)

    def _check_stamps(self, image: str, there: Any) -> None:
        path = self._base / "sessions" / f"{image}.jsonl"
        if not path.exists():
            return
        stamps = [_stamp(there.read(at, BLOCK_BYTES)) for at in range(0, there.size(), BLOCK_BYTES)]
        order = [each["session"] for each in stamps if each]
        if order != sorted(order):
            self._wrong("stamps of two sessions mixed", f"{image}: {order}")
        self.checked["sessions seen in images"] += len(set(order))
        lines = list(_lines(path))
        rivals = {line["session"] for line in lines if line["event"] == "refused"}
        for line in lines:
            if line["event"] == "ended" and line["session"] in rivals and _CLAIMED in line["why"]:
                self.checked["writers beside another node's that were refused"] += 1
            elif line["event"] == "admitted":
                self._wrong("writer beside another node's", f"{image}: {line}")
            elif line["event"] == "written":
                self.checked["acknowledged stamps"] += 1
                stamp = stamps[line["block"]]
                if not stamp or stamp["session"] != line["session"]:
                    self._wrong("acknowledged stamps lost", f"{image}: {line} is {stamp}")


def _heard(name: Name, line: dict[str, Any]) -> None:
    """Note what a line of the journal says of a name."""
    match line["event"]:
        case "created" | "snapshotted":
            name.id, name.state = line["id"], "there"
        case "delete" | "delete-snapshot":
            name.state = "deleting"
        case "deleted" | "deleted-snapshot":
            name.state = "gone"
        case "marked":
            name.marks.append(line["mark"])
        case "grown":
            name.size = line["size"]
        case "image" | "snapshot-image":
            name.identity = line["identity"]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """All lines; one that a killed process did not finish is not acknowledged."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def _key(engine: str, event: str, name: str) -> str:
    kind = "snap-" if "snapshot" in event else ""
    return f"{engine}:{kind}{hashlib.sha256(name.encode()).hexdigest()[:40]}"


def _key_of(place: str, id_: str) -> str:
    engine = "rbd" if place == "ceph" else "local"
    return f"{engine}:{id_.partition('-')[2]}"


def _digest_key(id_: str) -> str:
    """As etcd's placements are named."""
    rest = id_.partition("-")[2]
    return rest.replace("snap-", "snapshot-") if rest.startswith("snap-") else f"volume-{rest}"


def _stamp(block: bytes) -> dict[str, Any] | None:
    return json.loads(block) if block[:1] == b"{" else None


def _has(path: Path, mark: bytes) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        return data.find(mark) >= 0


def main() -> int:
    """Check a directory; 1 if anything is wrong."""
    checker = Checker(Path(sys.argv[1]))
    checker.run()
    for what, number in sorted(checker.checked.items()):
        _say(f"{number:7}  {what}")
    _say("")
    for kind in KINDS:
        _say(f"{checker.counts[kind]:7}  {kind}")
    for line in checker.lines[:40]:
        _say(f"    {line}")
    return 1 if checker.counts else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
