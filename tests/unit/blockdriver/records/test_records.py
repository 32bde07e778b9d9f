"""Records on disk: what is read back, what is refused, and what is remembered of a store that does not answer."""

import json
from pathlib import Path
from typing import cast

import pytest

from crust.blockdriver.engines import pool_store
from crust.blockdriver.engines.pool_store import RecordStore
from crust.blockdriver.records import models
from crust.blockdriver.records.models import VolumeRecord
from crust.blockdriver.records.records import IndexedRecords
from crust.core import errors, volumes
from crust.core.pool_ids import PoolIds
from crust.host.files import durable
from tests.support.records.stored_records import file_records, made, place_of, removed

IDS = PoolIds("0123456789abcdef")
VOLUME = IDS.volume_id("pvc")


@pytest.fixture
def records(tmp_path: Path) -> IndexedRecords[VolumeRecord]:
    made = IndexedRecords(file_records(tmp_path), VolumeRecord, IDS.is_volume_id)
    made.open()
    return made


def volume(**changes: object) -> VolumeRecord:
    plain = VolumeRecord(volume_id=VOLUME, name="pvc", capacity_bytes=1, parameters={}, usages=())
    return plain.but(**changes)


def test_volume_record_loads_as_saved(records: IndexedRecords[VolumeRecord]) -> None:
    usage = models.Usage(kind="mount", fs_type="ext4", mode=1)
    saved = made(records, volume(usages=(usage,), parameters={"a": "b"}))
    assert records.load(VOLUME) == saved
    assert list(records.ids()) == [VOLUME]
    removed(records, VOLUME)
    assert records.find(VOLUME) is None


@pytest.mark.parametrize(
    "volume_id", ["", "../records/x", "vol-1", VOLUME + "0", VOLUME + "\n", IDS.snapshot_id("pvc")]
)
def test_load_of_an_invalid_id_never_becomes_a_path(
    records: IndexedRecords[VolumeRecord], volume_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    monkeypatch.setattr(durable, "read", lambda path, **_: read.append(path))
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
        ({"schema": 2, "shiny": True}, "schema 2"),
        ("", "record"),
        ("{}", "schema number"),
        ('{"schema": 2}', "schema 2"),
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
    with pytest.raises(models.RecordUnreadable, match=why):
        records.load(VOLUME)
    with pytest.raises(pool_store.RecordChanged):
        records.save(saved.but(capacity_bytes=2))
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
    records.save(read.but(capacity_bytes=2))
    written = json.loads(path.read_text())
    assert (written["shiny"], written["usages"][0]["label"]) == ([1], "fast")
    assert (written["limits"]["burst_iops"], written["capacity_bytes"]) == (7, 2)


def test_save_over_a_record_that_changed_since_it_was_read_is_refused(
    records: IndexedRecords[VolumeRecord],
) -> None:
    first = made(records, volume())
    stale = records.load(VOLUME)
    newer = records.save(first.but(capacity_bytes=2))
    with pytest.raises(pool_store.RecordChanged):
        records.save(stale.but(capacity_bytes=3))
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


def test_record_written_in_an_outage_is_read_after_it_and_not_damaged(tmp_path: Path) -> None:
    """What a write in an outage has left is unknown then, and asked for after it."""
    outage = _Outage(file_records(tmp_path))
    records = IndexedRecords(cast("RecordStore", outage), VolumeRecord, IDS.is_volume_id)
    records.open()
    present = made(records, volume())
    outage.is_on = True
    with pytest.raises(errors.PeerUnavailable):
        records.save(present.but(capacity_bytes=2))
    with pytest.raises(errors.PeerUnavailable):
        records.find(VOLUME)
    outage.is_on = False
    assert records.find(VOLUME) is not None
    assert (records.unreadable(), len(records.index)) == ([], 1)
    saved = records.save(present.but(capacity_bytes=2))
    assert records.load(VOLUME) == saved
    assert records.index.reserved_bytes() == 2


@pytest.mark.parametrize("is_there", [False, True])
def test_record_that_an_engine_may_have_made_in_an_outage_is_asked_for_after_it(
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
    assert (records.unreadable(), len(records.index)) == ([], int(is_there))
