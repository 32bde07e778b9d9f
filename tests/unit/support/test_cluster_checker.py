"""The checker of the cluster under faults: all that can be wrong is counted, and nothing of what is right."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cluster_chaos.checker import Checker
from tests.support.cluster_chaos.found import marked

A, B = "a" * 16, "b" * 16


class ClusterState:
    """Two pools, the journal and the keys of etcd, in which one volume and its snapshot are right."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.journal: list[dict[str, object]] = []
        self.placements: dict[str, str] = {}
        self.requests: list[str] = []
        self.volume = self.made(A, "v")
        self.said("create", "v")
        self.said("created", "v", id=self.volume)
        self.said("image", "v", identity=marked(base / "a", self.volume, "first"))
        self.said("marked", "v", mark="a mark")
        self.snapshot = self.made(A, "s", "snap-")
        self.said("snapshot", "s")
        self.said("snapshotted", "s", id=self.snapshot)
        self.said("snapshot-image", "s", identity=marked(base / "a", self.snapshot, "second"))

    def said(self, event: str, name: str, **values: object) -> None:
        """A line of the journal."""
        self.journal.append({"event": event, "engine": "local", "name": name, **values})

    def made(self, pool: str, name: str, kind: str = "") -> str:
        """A volume or snapshot in a pool, with its placement; its id."""
        rest = hashlib.sha256(name.encode()).hexdigest()[:40]
        id_ = f"{pool}-{kind}{rest}"
        self.record(id_).parent.mkdir(parents=True, exist_ok=True)
        self.record(id_).write_text('{"phase": "ready"}')
        self.image(id_).parent.mkdir(parents=True, exist_ok=True)
        self.image(id_).write_bytes(b"\0a mark\0")
        self.placements.setdefault(f"{'snapshot' if kind else 'volume'}-{rest}", pool)
        return id_

    def record(self, id_: str) -> Path:
        """Where its record is."""
        return self._pool(id_) / ("snapshots" if "snap" in id_ else "records") / f"{id_}.json"

    def image(self, id_: str) -> Path:
        """Where its bytes are."""
        return self._pool(id_) / "images" / f"{id_}.{'snap' if 'snap' in id_ else 'img'}"

    def _pool(self, id_: str) -> Path:
        return self.base / id_[0]

    def counts(self) -> dict[str, int]:
        """What the checker counts."""
        (self.base / "journal.jsonl").write_text("\n".join(map(json.dumps, self.journal)))
        places = {
            "pools": {"a": str(self.base / "a"), "b": str(self.base / "b")},
            "placements": self.placements,
            "requests": self.requests,
        }
        (self.base / "places.json").write_text(json.dumps(places))
        checker = Checker(self.base)
        checker.run()
        return dict(checker.counts)


@pytest.fixture
def places(tmp_path: Path) -> ClusterState:
    return ClusterState(tmp_path)


def test_checker_finds_nothing_if_all_that_was_answered_exists(places: ClusterState) -> None:
    assert places.counts() == {}


def _lose_volume(places: ClusterState) -> None:
    places.record(places.volume).unlink()
    places.image(places.volume).unlink()
    places.placements = {key: pool for key, pool in places.placements.items() if "snap" in key}


def _lose_snapshot(places: ClusterState) -> None:
    places.record(places.snapshot).unlink()
    places.image(places.snapshot).unlink()
    places.placements = {key: pool for key, pool in places.placements.items() if "vol" in key}


def _delete(places: ClusterState) -> None:
    places.said("delete", "v", id=places.volume)
    places.said("deleted", "v", id=places.volume)


def _replace(path: Path) -> None:
    """The same bytes, in a file that was made since."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


def _move_placement(places: ClusterState) -> None:
    places.placements = dict.fromkeys(places.placements, B)


WRONG: dict[str, Callable[[ClusterState], object]] = {
    "volumes lost": _lose_volume,
    "snapshots lost": _lose_snapshot,
    "names in two places": lambda places: places.made(B, "v"),
    "names answered with two ids": lambda places: places.said("created", "v", id=f"{B}-x"),
    "deleted, and there again": _delete,
    "nobody asked for it": lambda places: places.made(B, "w"),
    "without an answer at the end": lambda places: places.said("create", "w"),
    "record without image": lambda places: places.image(places.volume).unlink(),
    "image without record": lambda places: places.record(places.volume).unlink(),
    "record not ready": lambda places: places.record(places.volume).write_text(
        '{"phase": "creating"}'
    ),
    "data lost": lambda places: places.said("marked", "v", mark="another"),
    "another image than was answered": lambda places: _replace(places.image(places.volume)),
    "smaller than it was grown to": lambda places: places.said("grown", "v", size=1 << 20),
    "placement of nothing": lambda places: places.placements.update({"volume-0": A}),
    "volume without placement": lambda places: places.placements.clear(),
    "placement in another pool": _move_placement,
    "requests left in etcd": lambda places: places.requests.append("/crust/nodes/a/requests/1"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_counted(places: ClusterState, kind: str) -> None:
    WRONG[kind](places)
    assert kind in places.counts()


def test_snapshot_that_was_taken_again_is_counted(places: ClusterState) -> None:
    _replace(places.image(places.snapshot))
    assert places.counts() == {"another image than was answered": 1}
