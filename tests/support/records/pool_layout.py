"""Where the files of a pool in a directory are, for tests that look at them or damage them.

`pool` is the directory of the pool. The engine alone decides the layout; this file is the only one of the tests that
repeats it.
"""

from collections.abc import Iterable
from pathlib import Path

FOLDERS = ("images", "records", "content", "snapshots", "groups")


def image(pool: Path, volume_id: str) -> Path:
    return pool / "images" / f"{volume_id}.img"


def volume_record(pool: Path, volume_id: str) -> Path:
    return pool / "records" / f"{volume_id}.json"


def content_record(pool: Path, volume_id: str) -> Path:
    """The content record of a volume."""
    return pool / "content" / f"{volume_id}.json"


def snapshot_image(pool: Path, snapshot_id: str) -> Path:
    return pool / "images" / f"{snapshot_id}.snap"


def images(pool: Path) -> set[str]:
    """The ids of the volumes that have an image."""
    return {path.stem for path in (pool / "images").glob("*.img")}


def snapshot_images(pool: Path) -> set[str]:
    """The ids of the snapshots that have an image."""
    return {path.stem for path in (pool / "images").glob("*.snap")}


def volume_records(pool: Path) -> set[str]:
    """The ids of the volumes that have a volume record."""
    return {path.stem for path in (pool / "records").glob("*.json")}


def content_records(pool: Path) -> set[str]:
    """The ids of the volumes that have a content record."""
    return {path.stem for path in (pool / "content").glob("*.json")}


def files_of(pool: Path, volume_ids: Iterable[str]) -> set[Path]:
    """The files and directories of these volumes, and no others."""
    of = (image, volume_record, content_record)
    return {place(pool, each) for each in volume_ids for place in of}


def files(pool: Path) -> set[Path]:
    """All files and directories in the folders of the pool."""
    return {path for folder in FOLDERS for path in (pool / folder).rglob("*")}
