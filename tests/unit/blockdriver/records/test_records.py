"""Records on disk: what is read back, what is refused, and what is remembered of a store that does not answer."""

import json
import threading
from pathlib import Path
from typing import TypeVar, cast

import pytest

from crust.blockdriver.engines import pool_access
from crust.blockdriver.engines.pool_access import PoolIds, RecordStore
from crust.blockdriver.records import models
from crust.blockdriver.records.models import ContentRecord, Snapshot, SnapshotSet, VolumeRecord
from crust.blockdriver.records.records import IndexedRecords, Records
from crust.core import errors, volumes
from crust.host.files import durable
from tests.support.raised import raised
from tests.support.records.stored_records import file_records, made, place_of, removed

IDS = PoolIds("0123456789abcdef")
VOLUME = IDS.volume_id("pvc")
NEW = ContentRecord(volume_id=VOLUME, format_in="host")


M = TypeVar("M", VolumeRecord, SnapshotSet)


def opened(directory: Path, kind: type[M]) -> IndexedRecords[M]:
    """As after a start."""
    is_id = IDS.is_volume_id if kind is VolumeRecord else IDS.is_set_id
    made = IndexedRecords(file_records(directory), kind, is_id)
    made.open()
    return made


@pytest.fixture
def records(tmp_path: Path) -> IndexedRecords[VolumeRecord]:
    return opened(tmp_path, VolumeRecord)


@pytest.fixture
def contents(tmp_path: Path) -> Records[ContentRecord]:
    return Records(file_records(tmp_path), ContentRecord, IDS.is_volume_id)


def volume(**changes: object) -> VolumeRecord:
    plain = VolumeRecord(volume_id=VOLUME, name="pvc", capacity_bytes=1, parameters={}, usages=())
    return plain.replaced(**changes)


def test_volume_record_loads_as_saved(records: IndexedRecords[VolumeRecord]) -> None:
    usage = models.Usage(kind="mount", fs_type="ext4", mode=1)
    saved = made(records, volume(usages=(usage,), parameters={"a": "b"}))
    assert records.load(VOLUME) == saved
    assert list(records.index.page()) == [VOLUME]
    removed(records, VOLUME)
    assert records.find(VOLUME) is None


@pytest.mark.parametrize(
    "volume_id", ["", "../records/x", "vol-1", VOLUME + "0", VOLUME + "\n", IDS.snapshot_id("pvc")]
)
def test_load_of_an_invalid_id_never_becomes_a_path(
    records: IndexedRecords[VolumeRecord], volume_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    monkeypatch.setattr(durable, "find", lambda path, **_: read.append(path))
    assert records.find(volumes.VolumeId(volume_id)) is None
    assert read == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"capacity_bytes": -1}, "capacity_bytes"),
        ({"capacity_bytes": "1"}, "capacity_bytes"),
        ({"parameters": "odd"}, "parameters"),
        ({"volume_id": IDS.volume_id("other")}, "describes"),
        ({"schema": None}, "schema"),
        ({"schema": ...}, "schema number"),
        ({"schema": models.SCHEMA + 1, "shiny": True}, f"schema {models.SCHEMA + 1}"),
        ({"schema": models.SCHEMA - 1}, f"schema {models.SCHEMA - 1}"),
        ("", "record"),
        ("{}", "schema number"),
        ('{"schema": 3}', "schema 3"),
        ('{"schema": 0}', "schema 0"),
        ("[" * 100_000, "record"),
    ],
    ids=str,
)
def test_record_that_cannot_be_read_is_refused_and_kept(
    records: IndexedRecords[VolumeRecord], change: dict[str, object] | str, why: str
) -> None:
    saved, other = made(records, volume()), made(records, volume(volume_id=IDS.volume_id("beside")))
    path = place_of(records, VOLUME)
    text = change
    if not isinstance(text, str):
        plain = json.loads(path.read_text()) | change
        text = json.dumps({key: value for key, value in plain.items() if value is not ...})
    path.write_text(text)
    with raised("RecordUnreadable", match=why):
        records.load(VOLUME)
    with pytest.raises(pool_access.RecordChanged):
        records.save(saved.replaced(capacity_bytes=2))
    assert path.read_text() == text
    assert records.load(other.volume_id) == other


def test_save_keeps_a_field_of_a_later_version(records: IndexedRecords[VolumeRecord]) -> None:
    usage = models.Usage(kind="mount", fs_type="ext4", mode=1)
    made(records, volume(usages=(usage,)))
    path = place_of(records, VOLUME)
    later = json.loads(path.read_text()) | {"shiny": [1], "limits": {"burst_iops": 7}}
    later["usages"][0]["label"] = "fast"
    path.write_text(json.dumps(later))
    read = records.load(VOLUME)
    assert read.limits.value == volumes.IoLimits()
    records.save(read.replaced(capacity_bytes=2))
    written = json.loads(path.read_text())
    assert (written["shiny"], written["usages"][0]["label"]) == ([1], "fast")
    assert (written["limits"]["burst_iops"], written["capacity_bytes"]) == (7, 2)


def test_save_over_record_changed_since_read_is_refused(
    records: IndexedRecords[VolumeRecord],
) -> None:
    first = made(records, volume())
    stale = records.load(VOLUME)
    newer = records.save(first.replaced(capacity_bytes=2))
    with pytest.raises(pool_access.RecordChanged):
        records.save(stale.replaced(capacity_bytes=3))
    assert records.load(VOLUME) == newer
    assert records.index.reserved_bytes() == 2


class _Outage:
    """A store that does not answer for a while."""

    def __init__(self, store: RecordStore) -> None:
        self._store = store
        self.is_on = False

    def __getattr__(self, name: str) -> object:
        if self.is_on and name in ("load", "save"):
            raise errors.PeerUnavailable("the cluster does not answer")
        return getattr(self._store, name)


def test_record_written_in_outage_is_read_after_it(tmp_path: Path) -> None:
    """What a write in an outage has left is unknown then, and asked for after it."""
    outage = _Outage(file_records(tmp_path))
    records = IndexedRecords(cast("RecordStore", outage), VolumeRecord, IDS.is_volume_id)
    records.open()
    present = made(records, volume())
    outage.is_on = True
    with pytest.raises(errors.PeerUnavailable):
        records.save(present.replaced(capacity_bytes=2))
    with pytest.raises(errors.PeerUnavailable):
        records.find(VOLUME)
    outage.is_on = False
    assert records.find(VOLUME) is not None
    assert (records.unreadable(), len(records.index.page())) == ([], 1)
    saved = records.save(present.replaced(capacity_bytes=2))
    assert records.load(VOLUME) == saved
    assert records.index.reserved_bytes() == 2


@pytest.mark.parametrize("is_there", [False, True])
def test_record_perhaps_made_in_outage_is_asked_for_after_it(
    tmp_path: Path, *, is_there: bool
) -> None:
    outage = _Outage(file_records(tmp_path))
    records = IndexedRecords(cast("RecordStore", outage), VolumeRecord, IDS.is_volume_id)
    records.open()
    if is_there:
        made(records, volume())
    outage.is_on = True
    with pytest.raises(errors.PeerUnavailable), records.changing(VOLUME, volume().summary):
        records.find(VOLUME)
    assert records.index.has(VOLUME), "it may be there"
    outage.is_on = False
    assert (records.find(VOLUME) is not None) == is_there
    assert (records.unreadable(), len(records.index.page())) == ([], int(is_there))


def test_records_that_cannot_be_read_are_counted_after_a_start(
    records: IndexedRecords[VolumeRecord], tmp_path: Path
) -> None:
    damaged, whole = (IDS.volume_id(name) for name in "ab")
    for volume_id in (damaged, whole):
        made(records, volume(volume_id=volume_id))
    place_of(records, damaged).write_text("{")
    again = opened(tmp_path, VolumeRecord)
    assert again.index.page() == tuple(sorted((damaged, whole)))
    removed(again, whole)
    assert again.index.page() == (damaged,)


def test_group_of_20000_volumes_survives_a_restart(tmp_path: Path) -> None:
    ids = [IDS.volume_id(str(number)) for number in range(20_000)]
    state = {"size_bytes": 1, "state": "raw", "fs_type": "", "filled_bytes": 0, "format_in": "host"}
    snapshots = tuple(
        Snapshot.model_validate(
            {"snapshot_id": IDS.member_id("g", volume_id), "source_volume_id": volume_id, **state}
        )
        for volume_id in ids
    )
    group = SnapshotSet(set_id=IDS.group_id("g"), name="g", created_ns=1, snapshots=snapshots)
    saved = made(opened(tmp_path, SnapshotSet), group)
    again = opened(tmp_path, SnapshotSet)
    assert again.unreadable() == []
    assert again.find(group.set_id) == saved


def test_removed_content_record_is_not_written_by_late_writer(
    contents: Records[ContentRecord],
) -> None:
    read = made(contents, NEW)
    removed(contents, VOLUME)
    with pytest.raises(pool_access.RecordChanged):
        contents.save(read)
    assert contents.find(VOLUME) is None


def test_of_many_writers_that_read_the_same_revision_one_writes(
    contents: Records[ContentRecord],
) -> None:
    read, ready = made(contents, NEW), threading.Barrier(8, timeout=30)
    outcomes: list[type[Exception] | None] = []

    def write(size_bytes: int) -> None:
        ready.wait()
        try:
            contents.save(read.replaced(filled_bytes=size_bytes))
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
    assert outcomes.count(pool_access.RecordChanged) == 7
    assert contents.load(VOLUME).revision == 2


def test_missing_content_record_is_doubt_and_never_new(contents: Records[ContentRecord]) -> None:
    assert contents.find(VOLUME) is None
    with pytest.raises(models.RecordMissing, match=VOLUME):
        contents.load(VOLUME)
    assert contents.find(volumes.VolumeId("../records/x")) is None


@pytest.mark.parametrize("change", [{"state": "odd"}, {"revision": -1}], ids=str)
def test_content_record_that_is_not_understood_is_refused(
    contents: Records[ContentRecord], change: dict[str, object]
) -> None:
    made(contents, NEW)
    path = place_of(contents, VOLUME)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with raised("RecordUnreadable"):
        contents.load(VOLUME)
