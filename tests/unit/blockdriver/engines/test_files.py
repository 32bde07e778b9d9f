"""Files as an engine: records and snapshots."""

from collections.abc import Callable
from pathlib import Path

import pytest

from crust.blockdriver.engines.files.access import FileAccess
from crust.blockdriver.engines.files.images import Images
from crust.blockdriver.engines.files.provisioning import FileProvisioning
from crust.blockdriver.engines.files.snapshots import FileSnapshots
from crust.blockdriver.engines.protocol import Image
from crust.core import volumes
from tests.support.faults.syncs import recorded
from tests.support.records import record_store_contract
from tests.support.records.stored_records import file_records

MIB = 1024 * 1024


@pytest.mark.parametrize("check", record_store_contract.CHECKS)
def test_record_files_keep_to_the_contract_of_stores(
    tmp_path: Path, check: Callable[[record_store_contract.Maker], None]
) -> None:
    check(lambda: file_records(tmp_path / "records"))


def test_files_spare_a_hundredth_of_the_pool_and_at_least_64_mib(tmp_path: Path) -> None:
    images = Images(tmp_path, lambda _: True)
    space = FileProvisioning(images, FileAccess(images)).space()
    assert space.spare_bytes == max(space.size_bytes // 100, 64 * MIB)


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
