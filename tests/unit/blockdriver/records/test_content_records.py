"""What a volume holds: written by whoever read it last, and never guessed."""

import json
import threading
from pathlib import Path

import pytest

from crust.blockdriver.driver import Driver
from crust.blockdriver.engines import pool_store
from crust.blockdriver.records import models
from crust.blockdriver.records.models import ContentRecord
from crust.blockdriver.records.records import Records
from crust.core import errors, volumes
from crust.core.pool_ids import PoolIds
from tests.support.drivers import driver_state
from tests.support.drivers.memory_backend import MemoryBackend
from tests.support.faults import crashes
from tests.support.records import pool_layout
from tests.support.records.stored_records import file_records, made, place_of, removed

IDS = PoolIds("0123456789abcdef")
VOLUME = IDS.volume_id("pvc")
NEW = ContentRecord(volume_id=VOLUME)


@pytest.fixture
def records(tmp_path: Path) -> Records[ContentRecord]:
    return Records(file_records(tmp_path), ContentRecord, IDS.is_volume_id)


def test_content_record_that_was_removed_is_not_written_by_a_late_writer(
    records: Records[ContentRecord],
) -> None:
    read = made(records, NEW)
    removed(records, VOLUME)
    with pytest.raises(pool_store.RecordChanged):
        records.save(read)
    assert records.find(VOLUME) is None


def test_of_many_writers_that_read_the_same_revision_one_writes(
    records: Records[ContentRecord],
) -> None:
    read, ready = made(records, NEW), threading.Barrier(8, timeout=30)
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


@pytest.mark.parametrize("change", [{"state": "odd"}, {"revision": -1}], ids=str)
def test_content_record_that_is_not_understood_is_refused(
    records: Records[ContentRecord], change: dict[str, object]
) -> None:
    made(records, NEW)
    path = place_of(records, VOLUME)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(models.RecordUnreadable):
        records.load(VOLUME)


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return driver_state.opened(tmp_path)


async def test_create_writes_the_content_record_before_it_answers_and_delete_removes_it(
    driver: Driver,
) -> None:
    provisioner, known = driver.controller.provisioner, driver.stores.content_records
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
                made = await driver.controller.provisioner.create(driver_state.create())
                await driver.controller.provisioner.delete(made.volume_id)
            except Killed:
                pass
        if count() <= number:
            break
        driver = driver_state.opened(tmp_path, backend=backend)
        stores = driver.stores
        for thing_id in stores.volume_records.ids():
            assert stores.content_records.find(thing_id) is not None
        made = await driver.controller.provisioner.create(driver_state.create())
        assert stores.content_records.load(made.volume_id).state == "new"
        await driver.controller.provisioner.delete(made.volume_id)
        assert pool_layout.files(tmp_path / "state") == set()
        number += 1
    assert number > 10
