"""Counts what is wrong after a run, from what lies on the disks, in Ceph and in etcd; uses no code of crust.

    python -m tests.support.cluster_chaos.checker DIRECTORY

It reads the journals of the callers, the files of the pools, RBD by librbd and librados, and the keys of etcd, which
the caller lists in `places.json`. It knows the formats from the documents: an id ends with the first 40 digits of the
SHA-256 of its name, a pool has records/ID.json, images/ID.img, snapshots/ID.json and images/ID.snap, a
namespace of Ceph has crust.records.records and crust.records.snapshots with the keys d.ID.
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

BLOCK_BYTES = 1024
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
    "record not ready",
    "data lost",
    "smaller than it was grown to",
    "stamps of two sessions mixed",
    "acknowledged stamps lost",
    "placement of nothing",
    "volume without placement",
    "placement in another pool",
    "requests left in etcd",
)


@dataclass(slots=True)
class Name:
    """The last word on a name, of a volume or a snapshot."""

    id: str = ""
    state: str = "asked"
    marks: list[str] = field(default_factory=list)
    size: int = 0


@dataclass(frozen=True, slots=True)
class Thing:
    """A volume or snapshot that was found."""

    record: dict[str, Any] | None
    path: Path | None
    size: int
    """Bytes of the image; 0 if there is none."""


class Checker:
    """Finds and counts."""

    def __init__(self, base: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.checked: Counter[str] = Counter()
        self.found: list[str] = []
        self._base = base
        self._places: dict[str, Any] = json.loads((base / "places.json").read_text())

    def run(self) -> None:
        """Count everything."""
        names = self._names()
        local = {node: _pool(Path(path)) for node, path in self._places["pools"].items()}
        places = {**local, "ceph": self._ceph() if "ceph.conf" in self._places else {}}
        self._check_names(names, places)
        self._check_things(names, places)
        self._check_etcd(local)

    def _wrong(self, kind: str, what: str) -> None:
        assert kind in KINDS
        self.counts[kind] += 1
        self.found.append(f"{kind}: {what}")

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

    def _check_names(self, names: dict[str, Name], places: dict[str, dict[str, Thing]]) -> None:
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

    def _check_data(self, name: Name, thing: Thing, id_: str) -> None:
        if name.state != "there":
            return
        if thing.size < name.size:
            self._wrong("smaller than it was grown to", id_)
        for mark in name.marks:
            self.checked["marks in local volumes"] += 1
            if thing.path is None or not _has(thing.path, mark.encode()):
                self._wrong("data lost", id_)

    def _check_things(self, names: dict[str, Name], places: dict[str, dict[str, Thing]]) -> None:
        for place, things in places.items():
            for id_, thing in things.items():
                self.checked[f"found in {place}"] += 1
                if _key_of(place, id_) not in names:
                    self._wrong("nobody asked for it", f"{place}: {id_}")
                if thing.record is None:
                    self._wrong("image without record", f"{place}: {id_}")
                    continue
                if thing.size == 0:
                    self._wrong("record without image", f"{place}: {id_}")
                if thing.record["phase"] != "ready":
                    self._wrong("record not ready", f"{place}: {id_} {thing.record['phase']}")

    def _check_etcd(self, local: dict[str, dict[str, Thing]]) -> None:
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

    def _ceph(self) -> dict[str, Thing]:
        """Volumes and snapshots of the namespace; the stamps are checked on the way."""
        import rados
        import rbd

        things: dict[str, Thing] = {}
        with (
            rados.Rados(conffile=self._places["ceph.conf"], name="client.admin") as cluster,
            cluster.open_ioctx(self._places["ceph.pool"]) as ioctx,
        ):
            ioctx.set_namespace(self._places["ceph.namespace"])
            sizes: dict[str, int] = {}
            for image in rbd.RBD().list(ioctx):
                try:
                    there = rbd.Image(ioctx, image, read_only=True)
                except rbd.ImageNotFound:
                    self._wrong("name without image in Ceph", image)
                    continue
                with there:
                    sizes.update({each["name"]: each["size"] for each in there.list_snaps()})
                    if not image.startswith(
                        "deleted."
                    ):  # it keeps the snapshots of a deleted volume
                        sizes[image] = there.size()
                    self._check_stamps(image, there)
            records = _omap(ioctx, "crust.records.records")
            records |= _omap(ioctx, "crust.records.snapshots")
        for id_ in {*sizes, *records}:
            things[id_] = Thing(records.get(id_), None, sizes.get(id_, 0))
        return things

    def _check_stamps(self, image: str, there: Any) -> None:
        path = self._base / "sessions" / f"{image}.jsonl"
        if not path.exists():
            return
        stamps = [_stamp(there.read(at, BLOCK_BYTES)) for at in range(0, there.size(), BLOCK_BYTES)]
        order = [each["session"] for each in stamps if each]
        if order != sorted(order):
            self._wrong("stamps of two sessions mixed", f"{image}: {order}")
        self.checked["sessions seen in images"] += len(set(order))
        for line in _lines(path):
            if line["event"] == "written":
                self.checked["acknowledged stamps"] += 1
                found = stamps[line["block"]]
                if not found or found["session"] != line["session"]:
                    self._wrong("acknowledged stamps lost", f"{image}: {line} is {found}")


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


def _pool(directory: Path) -> dict[str, Thing]:
    """Volumes and snapshots of a pool of files."""
    records = {
        path.stem: json.loads(path.read_bytes())
        for folder in ("records", "snapshots")
        for path in (directory / folder).glob("*.json")
    }
    images = {
        path.stem: path
        for suffix in ("img", "snap")
        for path in (directory / "images").glob(f"*.{suffix}")
    }
    return {
        id_: Thing(records.get(id_), images.get(id_), _size(images.get(id_)))
        for id_ in {*records, *images}
    }


def _size(path: Path | None) -> int:
    return path.stat().st_size if path else 0


def _omap(ioctx: Any, name: str) -> dict[str, dict[str, Any]]:
    op = ioctx.create_read_op()
    try:
        values, _ = ioctx.get_omap_vals(op, "", "d.", 10_000)
        ioctx.operate_read_op(op, name)
        return {key.removeprefix("d."): json.loads(value) for key, value in values}
    finally:
        ioctx.release_read_op(op)


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
    for line in checker.found[:40]:
        _say(f"    {line}")
    return 1 if checker.counts else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
