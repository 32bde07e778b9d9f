"""The directories of a pool in files, and one volume."""

from pathlib import Path

from crust.blockdriver.engines.files.directories import Reserve, VolumeDirectories
from crust.blockdriver.engines.pool_access import PoolIds, RecordKind

IDS = PoolIds("0123456789abcdef")
VOLUME = IDS.volume_id("pvc-1")
RECORDS = {RecordKind.VOLUMES: b"a volume", RecordKind.CONTENT: b"its content"}


def directories(tmp_path: Path) -> VolumeDirectories:
    (tmp_path / "volumes").mkdir()
    reserve = Reserve(tmp_path / "reserve")
    return VolumeDirectories(tmp_path / "volumes", RecordKind.VOLUMES, IDS.is_volume_id, reserve)
