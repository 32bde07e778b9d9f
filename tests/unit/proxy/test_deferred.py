"""The in-memory index of the handoff directory: a scan never loses the proxy's own changes."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from crust import volumes
from crust.handoff import store
from crust.handoff.record import Record
from crust.proxy import reservations
from crust.proxy.deferred import DeferredVolumes
from tests.support import records


class SlowStore(store.Store):
    """A store whose scan has read the directory, and returns when the test allows it."""

    entered = threading.Event()
    go_on = threading.Event()
    scans = 0

    def scan(self) -> tuple[store.Entry, ...]:
        found = super().scan()
        self.scans += 1
        if self.scans == 1:
            self.entered.set()
            assert self.go_on.wait(20)
        return found


@pytest.fixture
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlowStore]:
    directory = SlowStore(str(tmp_path_factory.mktemp("run") / "volumes"))
    directory.entered, directory.go_on = threading.Event(), threading.Event()
    directory.open()
    yield directory
    directory.go_on.set()


async def test_publish_during_a_scan_stays_in_the_index(slow: SlowStore) -> None:
    deferred, record = DeferredVolumes(slow), records.a_record()
    scan = asyncio.create_task(deferred.load())
    await asyncio.to_thread(slow.entered.wait, 20)
    deferred.remember(await asyncio.to_thread(deferred.publish, record))
    slow.go_on.set()
    await scan
    assert slow.scans == 2
    assert deferred.find(record.target.text) == record
    assert deferred.of_volume(record.key) == (record,)


async def test_unpublish_during_a_scan_does_not_reappear_in_the_index(slow: SlowStore) -> None:
    slow.publish(records.a_record())
    deferred, record = DeferredVolumes(slow), records.a_record()
    scan = asyncio.create_task(deferred.load())
    await asyncio.to_thread(slow.entered.wait, 20)
    with slow.begin_unpublish(record.target) as unpublish:
        unpublish.complete()
    deferred.forget(record.target.text)
    slow.go_on.set()
    await scan
    assert deferred.find(record.target.text) is None
    assert deferred.of_volume(record.key) == ()


async def test_device_is_reserved_while_its_entry_is_created(slow: SlowStore) -> None:
    """Two volumes on one device, published at the same time: neither is in the index yet."""
    deferred = DeferredVolumes(slow)
    one = records.a_record("/var/lib/kubelet/one")
    two = _other_volume(records.a_record("/var/lib/kubelet/two"))
    with (
        deferred.reserved(one),
        pytest.raises(reservations.DeviceReserved, match="/var/lib/kubelet/one"),
        deferred.reserved(two),
    ):
        raise AssertionError("two writers")
    with deferred.reserved(two):
        pass


async def test_record_with_a_new_device_releases_the_old_one(slow: SlowStore) -> None:
    deferred, record = DeferredVolumes(slow), records.a_record()
    deferred.remember(record)
    source = volumes.BlockSource("/dev/loop9", volumes.DeviceIdentity(7, 9, 99))
    deferred.remember(replace(record, mount=replace(record.mount, source=source)))
    wanted = reservations.of(_other_volume(records.a_record("/var/lib/kubelet/two")))
    deferred.check_unreserved(wanted)
    with pytest.raises(reservations.DeviceReserved):
        deferred.check_unreserved(replace(wanted, identity=source.identity))


def _other_volume(record: Record) -> Record:
    return replace(record, key=replace(record.key, volume_id=volumes.VolumeId("vol-2")))
