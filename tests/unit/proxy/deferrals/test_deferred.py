"""The owner of the handoff directory: looks and the proxy's own changes meet, and devices are reserved."""

import asyncio
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from crust import volumes
from crust.handoff import look, store
from crust.handoff.record import Record
from crust.host.block.device_sets import DeviceSet
from crust.proxy.deferrals import reservations
from crust.proxy.deferrals.deferred import DeferredVolumes
from tests.support.nodes.fake_targets import FakeDevices
from tests.support.records import records
from tests.support.runtimes import fake_handler

RECORD = records.a_record()
ALONE = DeviceSet.alone(RECORD.identity)


class SlowLooks(look.Looks):
    """Looks that have read the directory, and return when the test allows it."""

    entered = threading.Event()
    go_on = threading.Event()

    def look(self) -> look.Look:
        found = super().look()
        self.entered.set()
        assert self.go_on.wait(20)
        return found


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> store.Store:
    directory = store.Store(str(tmp_path_factory.mktemp("run") / "volumes"))
    directory.open()
    return directory


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[SlowLooks]]:
    SlowLooks.entered, SlowLooks.go_on = threading.Event(), threading.Event()
    monkeypatch.setattr("crust.proxy.deferrals.deferred.Looks", SlowLooks)
    yield SlowLooks
    SlowLooks.go_on.set()


def _deferred(directory: store.Store) -> DeferredVolumes:
    return DeferredVolumes(directory, FakeDevices())


async def test_publish_during_a_scan_stays_in_the_index(
    slow: type[SlowLooks], directory: store.Store
) -> None:
    deferred = _deferred(directory)
    looking = asyncio.create_task(deferred.look())
    await asyncio.to_thread(slow.entered.wait, 20)
    deferred.remember(await asyncio.to_thread(deferred.publish, RECORD), ALONE)
    slow.go_on.set()
    await looking
    assert deferred.find(RECORD.target.text) == RECORD
    assert deferred.of_volume(RECORD.key) == (RECORD,)


async def test_unpublish_during_a_scan_does_not_reappear_in_the_index(
    slow: type[SlowLooks], directory: store.Store
) -> None:
    directory.publish(RECORD)
    deferred = _deferred(directory)
    looking = asyncio.create_task(deferred.look())
    await asyncio.to_thread(slow.entered.wait, 20)
    with directory.begin_unpublish(RECORD.target) as unpublish:
        unpublish.complete()
    deferred.forget(RECORD.target)
    slow.go_on.set()
    await looking
    assert deferred.find(RECORD.target.text) is None
    assert deferred.of_volume(RECORD.key) == ()


async def test_look_ends_while_publishes_go_on_and_the_next_one_reads_what_it_skipped(
    slow: type[SlowLooks], directory: store.Store
) -> None:
    """A publish in every look: it neither makes a look begin again, nor is anything lost."""
    directory.publish(RECORD)
    deferred = _deferred(directory)
    for number in range(3):
        slow.entered.clear()
        slow.go_on.clear()
        looking = asyncio.create_task(deferred.look())
        await asyncio.to_thread(slow.entered.wait, 20)
        other = _other_volume(records.a_record(f"/var/lib/kubelet/{number}"))
        deferred.remember(await asyncio.to_thread(deferred.publish, other), ALONE)
        slow.go_on.set()
        await looking
    assert len(deferred.all()) == 4
    os.rename(directory.layout.entry(RECORD.target).directory, f"{directory.root}/../moved")
    await deferred.look()
    assert deferred.find(RECORD.target.text) is None
    assert len(deferred.all()) == 3


async def test_claim_seen_only_by_a_listing_of_entries_is_reported_by_the_next_scan(
    directory: store.Store,
) -> None:
    """`crust volumes` at the wrong moment must not take the event of a claim from those who watch."""
    directory.publish(RECORD)
    deferred = _deferred(directory)
    await deferred.look()
    with fake_handler.sandbox(directory.root, RECORD.target.text, name="box-7"):
        await deferred.entries()
    seen = [each.claim and each.claim.sandbox_id for each in await deferred.look()]
    assert seen == ["box-7", None]


async def test_look_at_rest_reads_only_a_few_entries_in_turn(
    directory: store.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among them, after some looks, one that was damaged in place: its directory has not changed."""
    monkeypatch.setattr(look, "FRESH_NS", 0)
    deferred = _deferred(directory)
    for number in range(20):
        directory.publish(_other_volume(records.a_record(f"/var/lib/kubelet/{number}")))
    assert len(await deferred.look()) == 20
    damaged = directory.layout.entry(volumes.TargetPath("/var/lib/kubelet/7"))
    before = os.stat(damaged.directory).st_mtime_ns
    Path(damaged.record).write_text("{")
    assert os.stat(damaged.directory).st_mtime_ns == before
    looks = [await deferred.look() for _ in range(20 // look.IN_TURN)]
    assert max(len(each) for each in looks) == look.IN_TURN + 1  # one that is damaged, each time
    with pytest.raises(Exception, match="cannot be read"):
        deferred.find("/var/lib/kubelet/7")


async def test_device_is_reserved_while_its_entry_is_created(directory: store.Store) -> None:
    """Two volumes on one device, published at the same time: neither is in the index yet."""
    deferred = _deferred(directory)
    one = records.a_record("/var/lib/kubelet/one")
    two = _other_volume(records.a_record("/var/lib/kubelet/two"))
    with (
        deferred.reserved(one, ALONE),
        pytest.raises(reservations.DeviceReserved, match="/var/lib/kubelet/one"),
        deferred.reserved(two, ALONE),
    ):
        raise AssertionError("two writers")
    with deferred.reserved(two, ALONE):
        pass


@pytest.mark.parametrize("first", ["disk", "partition"])
async def test_partition_and_its_disk_are_one_reservation_whichever_comes_first(
    directory: store.Store, first: str
) -> None:
    deferred = _deferred(directory)
    disk, partition = volumes.DeviceIdentity(8, 0, 5), volumes.DeviceIdentity(8, 1, 5)
    sets = {
        "disk": DeviceSet(frozenset({disk}), frozenset({disk, partition})),
        "partition": DeviceSet(frozenset({partition}), frozenset({disk, partition})),
    }
    neighbour = volumes.DeviceIdentity(8, 2, 5)
    other = DeviceSet(frozenset({neighbour}), frozenset({neighbour, disk}))
    deferred.remember(RECORD, sets.pop(first))
    (second,) = sets.values()
    wanted = _other_volume(records.a_record("/var/lib/kubelet/two"))
    with pytest.raises(reservations.DeviceReserved), deferred.reserved(wanted, second):
        raise AssertionError("two writers")
    if first == "partition":
        with deferred.reserved(wanted, other):
            pass


async def test_record_with_a_new_device_releases_the_old_one(directory: store.Store) -> None:
    deferred = _deferred(directory)
    deferred.remember(RECORD, ALONE)
    source = volumes.BlockSource("/dev/loop9", volumes.DeviceIdentity(7, 9, 99))
    moved = replace(RECORD, mount=replace(RECORD.mount, source=source))
    deferred.remember(moved, DeviceSet.alone(source.identity))
    wanted = reservations.of(_other_volume(records.a_record("/var/lib/kubelet/two")), ALONE)
    deferred.check_unreserved(wanted)
    with pytest.raises(reservations.DeviceReserved):
        deferred.check_unreserved(replace(wanted, devices=DeviceSet.alone(source.identity)))


def _other_volume(record: Record) -> Record:
    return replace(record, key=replace(record.key, volume_id=volumes.VolumeId("vol-2")))
