"""What a volume holds: written by whoever read it last, and never guessed."""

import errno
import json
import threading
from pathlib import Path

import pytest

from crust.blockdriver.driver import Driver
from crust.blockdriver.engines import pool_store
from crust.blockdriver.records import models
from crust.blockdriver.records.models import ContentRecord, GroupRecord, SnapshotRecord
from crust.blockdriver.records.records import Records
from crust.core import errors, volumes
from crust.core.pool_ids import PoolIds
from crust.host.files import durable
from tests.support.drivers import driver_state
from tests.support.drivers.memory_backend import MemoryBackend
from tests.support.faults import crashes
from tests.support.records import pool_layout
from tests.support.records.stored_records import file_records

IDS = PoolIds("0123456789abcdef")
VOLUME = IDS.volume_id("pvc")
NEW = ContentRecord(volume_id=VOLUME)


@pytest.fixture
def records(tmp_path: Path) -> Records[ContentRecord]:
    made = Records(file_records(tmp_path), ContentRecord, IDS.is_volume_id)
    made.open()
    return made


def test_content_record_comes_back_with_the_next_revision(records: Records[ContentRecord]) -> None:
    saved = records.save(NEW)
    assert (saved.revision, records.load(VOLUME)) == (1, saved)
    formatted = records.save(saved.but(state="formatted", fs_type="ext4"))
    assert (formatted.revision, records.load(VOLUME)) == (2, formatted)


def test_stale_copy_of_a_content_record_is_refused_and_changes_nothing(
    records: Records[ContentRecord],
) -> None:
    stale = records.save(NEW)
    formatted = records.save(stale.but(state="formatted", fs_type="ext4"))
    for late in (stale, stale.but(state="formatting", fs_type="ext4"), NEW):
        with pytest.raises(pool_store.RecordChanged):
            records.save(late)
    assert records.load(VOLUME) == formatted


def test_content_record_that_was_removed_is_not_written_by_a_late_writer(
    records: Records[ContentRecord],
) -> None:
    read = records.save(NEW)
    records.remove(VOLUME)
    with pytest.raises(pool_store.RecordChanged):
        records.save(read)
    assert records.find(VOLUME) is None


def test_of_many_writers_that_read_the_same_revision_one_writes(
    records: Records[ContentRecord],
) -> None:
    read, ready = records.save(NEW), threading.Barrier(8, timeout=30)
    outcomes: list[type[Exception] | None] = []

    def write(size_bytes: int) -> None:
        ready.wait()
        try:
            records.save(read.but(filled_bytes=size_bytes))
        except errors.CrustError as err:
            outcomes.append(type(err))
        else:
            outcomes.append(None)

    threads = [threading.Thread(target=write, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count(None) == 1
    assert outcomes.count(pool_store.RecordChanged) == 7
    assert records.load(VOLUME).revision == 2


def test_missing_content_record_is_doubt_and_never_new(records: Records[ContentRecord]) -> None:
    assert records.find(VOLUME) is None
    with pytest.raises(models.RecordMissing, match=VOLUME):
        records.load(VOLUME)
    assert records.find(volumes.VolumeId("../records/x")) is None


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"schema": 2}, models.RecordUnreadable),
        ({"schema": None}, models.RecordUnreadable),
        ({"state": "odd"}, models.RecordUnreadable),
        ({"revision": -1}, models.RecordUnreadable),
        ({"volume_id": IDS.volume_id("other")}, models.RecordUnreadable),
    ],
)
def test_content_record_that_is_not_understood_is_refused_and_kept(
    records: Records[ContentRecord],
    tmp_path: Path,
    change: dict[str, object],
    error: type[Exception],
) -> None:
    saved = records.save(NEW)
    path = tmp_path / f"{VOLUME}.json"
    text = json.dumps(json.loads(path.read_text()) | change)
    path.write_text(text)
    with pytest.raises(error):
        records.load(VOLUME)
    with pytest.raises(pool_store.RecordChanged):
        records.save(saved)
    assert path.read_text() == text


def test_content_record_field_of_a_later_version_is_kept(
    records: Records[ContentRecord], tmp_path: Path
) -> None:
    records.save(NEW)
    path = tmp_path / f"{VOLUME}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fs_uuid": "1-2"}))
    records.save(records.load(VOLUME).but(in_guest=True))
    written = json.loads(path.read_text())
    assert (written["fs_uuid"], written["in_guest"], written["revision"]) == ("1-2", True, 2)


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return driver_state.opened(tmp_path)


async def test_create_writes_the_content_record_before_it_answers_and_delete_removes_it(
    driver: Driver,
) -> None:
    provisioner, known = driver.controller_rules.provisioner, driver.stores.content_records
    made = await provisioner.create(driver_state.create())
    written = known.load(made.volume_id)
    assert written.encode() == ContentRecord(volume_id=made.volume_id, revision=1).encode()
    again = await provisioner.create(driver_state.create())
    assert (again, known.load(made.volume_id).revision) == (made, 1)
    await provisioner.delete(made.volume_id)
    assert known.find(made.volume_id) is None


async def test_create_and_delete_killed_at_any_call_leave_both_records_or_none(
    driver: Driver, tmp_path: Path
) -> None:
    class Killed(BaseException):
        """The process ends here."""

    def killed(_: str) -> None:
        raise Killed

    backend, number = driver.stores.provisioning, 0
    assert isinstance(backend, MemoryBackend)
    while True:
        with crashes.at_call(number, killed) as count:
            try:
                made = await driver.controller_rules.provisioner.create(driver_state.create())
                await driver.controller_rules.provisioner.delete(made.volume_id)
            except Killed:
                pass
        if count() <= number:
            break
        driver = driver_state.opened(tmp_path, backend=backend)
        stores = driver.stores
        for each in stores.volume_records.ids():
            assert stores.content_records.find(each) is not None
        made = await driver.controller_rules.provisioner.create(driver_state.create())
        assert stores.content_records.load(made.volume_id).state == "new"
        await driver.controller_rules.provisioner.delete(made.volume_id)
        assert pool_layout.files(tmp_path / "state") == set()
        number += 1
    assert number > 10


# Records of snapshots on disk: what is read back, and what is refused.


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
