"""Where the files of a pool in a directory are, for tests that look at them or damage them.

`pool` is the directory of the pool. The engine alone decides the layout; this file is the only one of the tests that
repeats it.
"""

from collections.abc import Iterable
from pathlib import Path

from crust.blockdriver.engines.pool_access import set_of

FOLDERS = ("volumes", "snapshots")


def directory(pool: Path, volume_id: str) -> Path:
    return pool / "volumes" / volume_id


def image(pool: Path, volume_id: str) -> Path:
    return pool / "volumes" / volume_id / f"{volume_id}.img"


def volume_record(pool: Path, volume_id: str) -> Path:
    return pool / "volumes" / volume_id / "volume.json"


def content_record(pool: Path, volume_id: str) -> Path:
    return pool / "volumes" / volume_id / "content.json"


def snapshot_image(pool: Path, snapshot_id: str) -> Path:
    return pool / "snapshots" / set_of(snapshot_id) / f"{snapshot_id}.snap"


def snapshot_set(pool: Path, set_id: str) -> Path:
    """The record of a single snapshot or of a group."""
    return pool / "snapshots" / set_id / "set.json"


def set_records(pool: Path) -> set[str]:
    """The ids of the sets that have a record."""
    return {path.parent.name for path in (pool / "snapshots").glob("*/set.json")}


def images(pool: Path) -> set[str]:
    """The ids of the volumes that have an image."""
    return {path.stem for path in (pool / "volumes").glob("*/*.img")}


def snapshot_images(pool: Path) -> set[str]:
    """The ids of the snapshots that have an image."""
    return {path.stem for path in (pool / "snapshots").glob("*/*.snap")}


def volume_records(pool: Path) -> set[str]:
    """The ids of the volumes that have a volume record."""
    return {path.parent.name for path in (pool / "volumes").glob("*/volume.json")}


def content_records(pool: Path) -> set[str]:
    """The ids of the volumes that have a content record."""
    return {path.parent.name for path in (pool / "volumes").glob("*/content.json")}


def files_of(pool: Path, volume_ids: Iterable[str]) -> set[Path]:
    """The files and directories of these volumes, and no others."""
    of = (directory, image, volume_record, content_record)
    return {place(pool, volume_id) for volume_id in volume_ids for place in of}


def files(pool: Path) -> set[Path]:
    """All files and directories in the folders of the pool."""
    return {path for folder in FOLDERS for path in (pool / folder).rglob("*")}
