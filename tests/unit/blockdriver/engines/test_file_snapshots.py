"""What is copied or compared includes what only the page cache of the volume's device has."""

from collections.abc import Callable
from pathlib import Path

import pytest

from crust import volumes
from crust.blockdriver.engines.files.snapshots import FileSnapshots
from crust.blockdriver.engines.protocol import Image
from tests.support.faults.syncs import recorded

SIZE = 8192
IMAGE = Image("snap", volumes.VolumeId("v"), SIZE)


def take(snapshots: FileSnapshots, volume: Path, device: str) -> None:
    snapshots.take(IMAGE, volume, device)


def moved_on(snapshots: FileSnapshots, volume: Path, device: str) -> None:
    snapshots.moved_on(IMAGE, volume, device)


def clone(snapshots: FileSnapshots, volume: Path, device: str) -> None:
    target = volume.with_suffix(".copy")
    snapshots.clone(volume, device, target, source_bytes=SIZE, size_bytes=SIZE)


@pytest.mark.parametrize("call", [take, moved_on, clone])
def test_the_device_is_written_back_before_its_file_is_copied_or_compared(
    tmp_path: Path, call: Callable[[FileSnapshots, Path, str], None]
) -> None:
    volume, device, snapshot = (tmp_path / name for name in ("v.img", "device", "snap.snap"))
    for path in (volume, device, snapshot):
        path.write_bytes(b"x" * SIZE)
    snapshots = FileSnapshots(tmp_path)
    assert snapshots.by_reference in (True, False)  # tried before the calls are recorded
    with recorded() as steps:
        call(snapshots, volume, str(device))
    assert steps[0] == ("sync", str(device))
