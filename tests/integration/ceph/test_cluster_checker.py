"""The checker of the cluster under faults, on a real Ceph: it is shown each wrong, made by hand, and says so.

What is in files and in etcd is in `tests/unit/support/test_cluster_checker.py`.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.support.cluster_chaos.checker import BLOCK_BYTES, Checker
from tests.support.cluster_chaos.found import Ceph, identity

MIB = 1024**2
POOL_ID = "0123456789abcdef"


class Namespace:
    """A volume, and another one with a snapshot, which are as they were answered; the first has stamps."""

    def __init__(self, base: Path, ceph: CephCluster, ioctx: Any, namespace: str) -> None:
        self.base = base
        self.ioctx = ioctx
        self.ceph = Ceph(str(ceph.conf), POOL, namespace)
        self.journal: list[dict[str, object]] = []
        self.sessions: list[dict[str, object]] = []
        self.volume, self.other = self.made("v"), self.made("w")
        self.snapshot = self.id("s", "snap-")
        self.snap(self.other, self.snapshot)
        self.said("snapshot", "s")
        self.said("snapshotted", "s", id=self.snapshot)
        which = identity(self.ceph, self.other, self.snapshot)
        self.said("snapshot-image", "s", identity=which)
        self.write(1, 0)
        self.write(2, 1)

    def id(self, name: str, kind: str = "") -> str:
        """As the driver makes it."""
        return f"{POOL_ID}-{kind}{hashlib.sha256(name.encode()).hexdigest()[:40]}"

    def said(self, event: str, name: str, **values: object) -> None:
        """A line of the caller's journal."""
        self.journal.append({"event": event, "engine": "rbd", "name": name, **values})

    def made(self, name: str) -> str:
        """A volume that was answered."""
        volume_id = self.id(name)
        self.image(volume_id)
        self.record("records", volume_id)
        self.said("create", name)
        self.said("created", name, id=volume_id)
        self.said("image", name, identity=identity(self.ceph, volume_id))
        return volume_id

    def image(self, name: str) -> None:
        """An empty image."""
        import rbd

        rbd.RBD().create(self.ioctx, name, MIB, old_format=False, features=1)

    def remove(self, name: str) -> None:
        """Remove an image."""
        import rbd

        rbd.RBD().remove(self.ioctx, name)

    def rename(self, name: str, to: str) -> None:
        """Give an image another name."""
        import rbd

        rbd.RBD().rename(self.ioctx, name, to)

    def snap(self, image: str, name: str) -> None:
        """Take a snapshot."""
        with self.opened(image) as there:
            there.create_snap(name)
        self.record("snapshots", name)

    def unsnap(self, image: str, name: str) -> None:
        """Remove a snapshot and leave its record."""
        with self.opened(image) as there:
            there.remove_snap(name)

    def opened(self, image: str) -> Any:
        """To be closed."""
        import rbd

        return rbd.Image(self.ioctx, image)

    def record(self, kind: str, id_: str) -> None:
        """A record that says ready."""
        op = self.ioctx.create_write_op()
        self.ioctx.set_omap(op, (f"d.{id_}",), (b'{"phase": "ready"}',))
        self.ioctx.operate_write_op(op, f"crust.records.{kind}")
        self.ioctx.release_write_op(op)

    def write(self, session: int, block: int, *, is_acknowledged: bool = True) -> None:
        """A stamp of a session in the first volume."""
        with self.opened(self.volume) as there:
            stamp = json.dumps({"session": session, "node": "a", "block": block}).encode()
            there.write(stamp.ljust(BLOCK_BYTES), block * BLOCK_BYTES)
        if is_acknowledged:
            self.sessions.append({"event": "written", "session": session, "block": block})

    def counts(self) -> dict[str, int]:
        """What the checker counts."""
        (self.base / "sessions").mkdir()
        journals = {"journal": self.journal, f"sessions/{self.volume}": self.sessions}
        for name, lines in journals.items():
            (self.base / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
        places = {
            "pools": {},
            "placements": {},
            "requests": [],
            "ceph.conf": self.ceph.conf,
            "ceph.pool": self.ceph.pool,
            "ceph.namespace": self.ceph.namespace,
        }
        (self.base / "places.json").write_text(json.dumps(places))
        checker = Checker(self.base)
        checker.run()
        return dict(checker.counts)

    def told(self) -> tuple[int, str]:
        """The exit code and the output of the checker's process, after `counts`."""
        command = (sys.executable, "-m", "tests.support.cluster_chaos.checker", str(self.base))
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, done.stdout


@pytest.fixture
def there(ceph: CephCluster, namespace: str, tmp_path: Path) -> Iterator[Namespace]:
    with ceph.ioctx(POOL, namespace) as ioctx:
        yield Namespace(tmp_path, ceph, ioctx, namespace)


def test_checker_finds_nothing_if_all_that_was_answered_exists(there: Namespace) -> None:
    assert there.counts() == {}
    code, output = there.told()
    assert (code, "      0  volumes lost\n" in output) == (0, True)


def test_process_tells_what_is_wrong_and_fails(there: Namespace) -> None:
    _lose(there)
    assert there.counts() == {"volumes lost": 1}
    code, output = there.told()
    assert code == 1
    assert "      1  volumes lost\n" in output
    assert f"    volumes lost: {there.volume}, found []\n" in output


def _lose(there: Namespace) -> None:
    there.remove(there.volume)
    op = there.ioctx.create_write_op()
    there.ioctx.remove_omap_keys(op, (f"d.{there.volume}",))
    there.ioctx.operate_write_op(op, "crust.records.records")
    there.ioctx.release_write_op(op)
    there.sessions.clear()


def _recreate(there: Namespace) -> None:
    there.remove(there.volume)
    there.image(there.volume)
    there.sessions.clear()


def _snap_again(there: Namespace) -> None:
    there.unsnap(there.other, there.snapshot)
    there.snap(there.other, there.snapshot)


def _keep_without_snapshots(there: Namespace) -> None:
    there.image("deleted.x.1")


def _move_to_trash(there: Namespace) -> None:
    import rbd

    there.image("x")
    rbd.RBD().trash_move(there.ioctx, "x", 0)


def _lose_header(there: Namespace) -> None:
    there.ioctx.remove_object(f"rbd_id.{there.other}")


WRONG: dict[str, Callable[[Namespace], object]] = {
    "volumes lost": _lose,
    "snapshots lost": lambda there: there.said("snapshotted", "s", id=f"{POOL_ID}-snap-x"),
    "deleted, and there again": lambda there: there.said("deleted", "w", id=there.other),
    "nobody asked for it": lambda there: there.image("x"),
    "record without image": lambda there: there.unsnap(there.other, there.snapshot),
    "image without record": lambda there: there.image("x"),
    "name without image in Ceph": _lose_header,
    "kept image of a deleted volume without snapshots": _keep_without_snapshots,
    "images left in Ceph's trash": _move_to_trash,
    "another image than was answered": _recreate,
    "smaller than it was grown to": lambda there: there.said("grown", "v", size=2 * MIB),
    "stamps of two sessions mixed": lambda there: there.write(1, 2),
    "acknowledged stamps lost": lambda there: there.write(2, 0, is_acknowledged=False),
    "writer beside another node's": lambda there: there.sessions.append(
        {
            "event": "admitted",
            "session": 3,
        }
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_wrong_is_counted(there: Namespace, kind: str) -> None:
    WRONG[kind](there)
    assert there.counts()[kind] == 1


def test_snapshot_that_was_taken_again_is_counted(there: Namespace) -> None:
    _snap_again(there)
    assert there.counts() == {"another image than was answered": 1}
