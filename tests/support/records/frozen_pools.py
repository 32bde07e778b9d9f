"""Pools as tests/data/pools has them: one file for each layout that a version of the driver has had.

A file names each path of a pool with its mode, and for a file its size and the text at its beginning. A record is
filled up with spaces; an image, without a text, is a hole. The ids are those of the pool 0123456789abcdef.
"""

import json
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crust.blockdriver.records.models import ContentRecord, SnapshotSet, VolumeRecord
from crust.blockdriver.records.stores import Stores
from tests.support.drivers.block_driver import MIB, Bench, block, mount

_DATA = Path(__file__).parents[2] / "data" / "pools"
NEW_NUMBER = (
    "the layout differs from that of its schema: raise the number, and freeze the new layout"
)


@dataclass(frozen=True, slots=True)
class FrozenPath:
    """A directory, or a file of `size` bytes that begins with `text`."""

    mode: str
    size: int | None = None
    text: str = ""

    @property
    def is_record(self) -> bool:
        return bool(self.text)


Frozen = dict[str, FrozenPath]


def load(schema: int) -> Frozen:
    """The pool of a layout, by path."""
    return parsed(json.loads((_DATA / f"directory-{schema}.json").read_text()))


def parsed(described: dict[str, Any]) -> Frozen:
    """The paths as their file describes them."""
    return {path: FrozenPath(**of) for path, of in described.items()}


def lay_out(frozen: Frozen, directory: Path) -> None:
    """Make the files of a pool in an existing directory."""
    for path, of in frozen.items():
        at = directory / path
        if of.size is None:
            at.mkdir()
        else:
            with at.open("wb") as file:
                file.write(of.text.encode().ljust(of.size if of.is_record else 0))
                file.truncate(of.size)
        at.chmod(int(of.mode, 8))


def taken(directory: Path) -> Frozen:
    """The pool in a directory, described as a frozen one; its images must be empty."""
    return {
        str(path.relative_to(directory)): _described(path) for path in sorted(directory.rglob("*"))
    }


def _described(path: Path) -> FrozenPath:
    status = path.lstat()
    mode = f"{stat.S_IMODE(status.st_mode):04o}"
    if path.is_dir():
        return FrozenPath(mode)
    text = path.read_bytes().rstrip(b" ").decode() if path.suffix == ".json" else ""
    return FrozenPath(mode, status.st_size, text)


async def fill(bench: Bench) -> None:
    """Make in a new pool what each frozen pool has: each kind of record."""
    mounted = (await bench.create("mounted", mount(), size=16 * MIB)).volume_id
    raw = (await bench.create("raw", block(), size=4 * MIB)).volume_id
    await bench.co.attach(mounted, "node-1")
    snapshot = await bench.co.snapshot(mounted)
    await bench.co.group(mounted, raw, name="group")
    await bench.create("restored", mount(), size=16 * MIB, snapshot=snapshot.snapshot_id)


def volume_id(frozen: Frozen) -> str:
    """The id of a volume of the pool."""
    names = (Path(path).stem for path in frozen if path.endswith(".img"))
    return min(names)


def check_read(stores: Stores) -> None:
    """All records of a pool that has what `fill` makes are read, each as its kind."""
    kinds: list[tuple[Any, type]] = [
        (stores.volume_records, VolumeRecord),
        (stores.snapshot_sets, SnapshotSet),
    ]
    for records, kind in kinds:
        assert records.unreadable() == []
        assert all(type(records.load(key)) is kind for key in records.index.page())
    volume_ids, set_ids = stores.volume_records.index.page(), stores.snapshot_sets.index.page()
    assert (len(volume_ids), len(set_ids)) == (3, 2)
    for volume_id in volume_ids:
        assert type(stores.content_records.load(volume_id)) is ContentRecord


def check_has(made: Any, frozen: Any, path: str) -> None:
    """Each field of the frozen record is in the one that was made, with its value."""
    if isinstance(frozen, dict):
        assert isinstance(made, dict), f"{path}: {NEW_NUMBER}"
        for key, value in frozen.items():
            assert key in made, f"{path}: {key}: {NEW_NUMBER}"
            if key != "created_ns":
                check_has(made[key], value, f"{path}: {key}")
    elif isinstance(frozen, list):
        assert len(made) == len(frozen), f"{path}: {NEW_NUMBER}"
        for one, other in zip(made, frozen, strict=True):
            check_has(one, other, path)
    else:
        assert made == frozen, f"{path}: {NEW_NUMBER}"
