"""Records of snapshots on disk: what is read back, and what is refused."""

import errno
import json
from pathlib import Path

import pytest

from crust.blockdriver.records import models
from crust.blockdriver.records.models import GroupRecord, SnapshotRecord
from crust.blockdriver.records.records import Records
from crust.core import errors
from crust.core.pool_ids import PoolIds
from crust.host.files import durable
from tests.support.records.stored_records import file_records

IDS = PoolIds("0123456789abcdef")
ID = IDS.snapshot_id("snap")


def shelf_in(directory: Path) -> Records[SnapshotRecord]:
    made = Records(file_records(directory), SnapshotRecord, IDS.is_snapshot_id)
    made.open()
    return made


def snapshot(name: str = "snap", **changes: object) -> SnapshotRecord:
    plain = SnapshotRecord(
        snapshot_id=IDS.snapshot_id(name),
        name=name,
        phase="ready",
        source_volume_id="vol-1",
        size_bytes=1,
        created_ns=2,
        state="raw",
        fs_type="",
        filled_bytes=0,
    )
    return plain.but(**changes)


def test_snapshot_record_survives_a_restart_until_removed(tmp_path: Path) -> None:
    saved = shelf_in(tmp_path).save(snapshot())
    again = shelf_in(tmp_path)
    assert again.find(ID) == saved
    again.remove(saved.id)
    assert shelf_in(tmp_path).find(ID) is None


def test_snapshot_record_keeps_a_field_of_a_later_version(tmp_path: Path) -> None:
    shelf_in(tmp_path).save(snapshot())
    path = tmp_path / f"{ID}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"shiny": 1}))
    again = shelf_in(tmp_path)
    read = again.find(ID)
    assert read is not None
    again.save(read.but(phase="deleting"))
    written = json.loads(path.read_text())
    assert (written["shiny"], written["phase"]) == (1, "deleting")


def test_snapshot_records_show_only_ready_ones(tmp_path: Path) -> None:
    snapshot_records = shelf_in(tmp_path)
    names = ["a", "b", "c", "d"]
    for name in names:
        snapshot_records.save(snapshot(name))
    snapshot_records.save(snapshot("x", phase="creating"))
    snapshot_records.save(snapshot("y", phase="deleting"))
    again = shelf_in(tmp_path)
    ids = [each.snapshot_id for each in again.ready()]
    assert ids == sorted(map(IDS.snapshot_id, names))
    assert {each.name for each in again.unfinished()} == {"x", "y"}


def test_count_of_snapshot_records_has_those_that_cannot_be_read(tmp_path: Path) -> None:
    records = shelf_in(tmp_path)
    assert len(records.index) == 0
    _, kept = [records.save(snapshot(name)) for name in ("a", "b")]
    (tmp_path / f"{IDS.snapshot_id('a')}.json").write_text("{")
    again = shelf_in(tmp_path)
    assert len(again.index) == 2
    again.remove(kept.id)
    assert len(again.index) == 1


@pytest.mark.parametrize(
    "data", [b"", b"{}", b'{"schema": 2}', b"\xff", b"[" * 100_000], ids=range(5)
)
def test_unreadable_snapshot_record_is_reported_and_others_are_served(
    tmp_path: Path, data: bytes
) -> None:
    shelf_in(tmp_path).save(snapshot("other"))
    path = tmp_path / f"{ID}.json"
    path.write_bytes(data)
    path.chmod(0o600)
    snapshot_records = shelf_in(tmp_path)
    with pytest.raises(models.RecordUnreadable):
        snapshot_records.find(ID)
    assert len(list(snapshot_records.ready())) == 1


def test_snapshot_record_under_another_name_is_refused(tmp_path: Path) -> None:
    shelf_in(tmp_path).save(snapshot("other"))
    other = tmp_path / f"{IDS.snapshot_id('other')}.json"
    other.rename(tmp_path / f"{ID}.json")
    with pytest.raises(models.RecordUnreadable, match="describes"):
        shelf_in(tmp_path).find(ID)


def test_group_record_of_all_volumes_survives_a_restart(tmp_path: Path) -> None:
    def groups() -> Records[GroupRecord]:
        made = Records(file_records(tmp_path), GroupRecord, IDS.is_group_id)
        made.open()
        return made

    ids = [IDS.volume_id(str(number)) for number in range(20_000)]
    saved = groups().save(
        GroupRecord(
            group_id=IDS.group_id("g"),
            name="g",
            phase="ready",
            created_ns=1,
            members=tuple((each, IDS.member_id("g", each)) for each in ids),
        )
    )
    again = groups()
    assert again.unreadable() == []
    assert again.find(saved.group_id) == saved


def test_snapshot_record_whose_removal_failed_at_its_sync_is_gone_and_can_be_removed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may bring it back, in phase "deleting": the start then discards it."""
    kept = shelf_in(tmp_path)
    saved = kept.save(snapshot(phase="deleting"))

    def full(_: str) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(durable, "_sync", full)
        with pytest.raises(errors.Exhausted):
            kept.remove(ID, previous=saved.stored)
    kept.remove(ID, previous=saved.stored)
    assert (kept.find(ID), len(kept.index), [*tmp_path.glob("*.json")]) == (None, 0, [])
