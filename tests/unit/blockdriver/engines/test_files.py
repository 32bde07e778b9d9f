"""Files as an engine: directories of volumes, records and snapshots."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from crust.blockdriver.engines import files
from crust.blockdriver.engines.files.directories import VolumeDirectories
from crust.blockdriver.engines.files.records import Reserve
from crust.blockdriver.engines.files.snapshots import FileSnapshots
from crust.blockdriver.engines.pool_store import RecordKind
from crust.blockdriver.engines.protocol import Image
from crust.core import errors, volumes
from crust.core.pool_ids import PoolIds
from tests.support.faults.syncs import recorded
from tests.support.raised import raised
from tests.support.records import pool_layout, record_store_contract
from tests.support.records.stored_records import file_records

MIB = 1024 * 1024


@pytest.mark.parametrize("check", record_store_contract.CHECKS)
def test_record_files_keep_to_the_contract_of_stores(
    tmp_path: Path, check: Callable[[record_store_contract.Maker], None]
) -> None:
    check(lambda: file_records(tmp_path / "records"))


def test_files_spare_a_hundredth_of_the_pool_and_at_least_64_mib(tmp_path: Path) -> None:
    engine = files.engine(str(tmp_path / "pool"), create=True)
    engine.home.open()
    engine.provisioning.open()
    space = engine.provisioning.space()
    assert space.spare_bytes == max(space.size_bytes // 100, 64 * MIB)


IDS = PoolIds("0123456789abcdef")
VOLUME = IDS.volume_id("pvc-1")
RECORDS = {RecordKind.VOLUMES: b"a volume", RecordKind.CONTENT: b"its content"}


def directories(tmp_path: Path) -> VolumeDirectories:
    (tmp_path / "volumes").mkdir()
    return VolumeDirectories(tmp_path / "volumes", IDS.is_volume_id, Reserve(tmp_path / "reserve"))


def test_volume_that_is_not_committed_leaves_nothing(tmp_path: Path) -> None:
    made = directories(tmp_path)
    with made.making(VOLUME) as staged:
        Path(staged.image).touch()
        assert (made.ids(), made.unsettled()) == (frozenset(), (VOLUME,))
    assert pool_layout.files(tmp_path) == set()
    with made.making(VOLUME) as staged:
        Path(staged.image).touch()
        staged.commit(RECORDS)
    assert pool_layout.files(tmp_path) == pool_layout.files_of(tmp_path, [VOLUME])


def test_volume_whose_name_may_not_be_durable_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = directories(tmp_path)
    _fail_syncs_of(tmp_path / "volumes", monkeypatch)

    def make() -> None:
        with made.making(VOLUME) as staged:
            Path(staged.image).touch()
            staged.commit(RECORDS)

    with pytest.raises(errors.CrustError):
        make()
    assert made.ids() == frozenset(), "a repeated create would answer OK for it"


def test_removal_that_failed_at_its_sync_is_synced_by_the_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = directories(tmp_path)
    with made.making(VOLUME) as staged:
        Path(staged.image).touch()
        staged.commit(RECORDS)
    with monkeypatch.context() as patch:
        _fail_syncs_of(tmp_path / "volumes", patch)
        for _ in range(2):
            with pytest.raises(errors.CrustError):
                made.remove(VOLUME)
    made.remove(VOLUME)
    assert made.ids() == frozenset()


def _fail_syncs_of(directory: Path, patch: pytest.MonkeyPatch) -> None:
    sync = os.fsync

    def failing(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") == str(directory):
            raise OSError(errno.EIO, "the disk fails")
        sync(fd)

    patch.setattr(os, "fsync", failing)


@pytest.mark.parametrize("left", [(), ("content.json",), ("content.json", f"{VOLUME}.img")])
def test_directory_without_a_volume_record_is_neither_taken_nor_removed(
    tmp_path: Path, left: tuple[str, ...]
) -> None:
    made = directories(tmp_path)
    directory = pool_layout.directory(tmp_path, VOLUME)
    directory.mkdir()
    for name in left:
        (directory / name).touch()
    with raised("OrphanImage"), made.making(VOLUME):
        pass
    made.remove(VOLUME)
    made.open()
    assert made.ids() == {VOLUME}
    assert {path.name for path in directory.iterdir()} == set(left)


def test_removal_that_could_not_free_the_space_is_finished_by_a_settlement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = directories(tmp_path)
    with made.making(VOLUME) as staged:
        staged.commit(RECORDS)

    def failing(_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", failing)
        made.remove(VOLUME)
    assert "is not removed now" in caplog.text
    assert (made.ids(), made.unsettled()) == (frozenset(), (VOLUME,))
    made.settle(VOLUME)
    assert pool_layout.files(tmp_path) == set()


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
