"""The table of targets: looks and the proxy's own changes meet, and devices are reserved."""

import asyncio
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from crust.core import errors, volumes
from crust.handoff import entry
from crust.handoff.record import Record
from crust.host.block.device_sets import DeviceSet
from crust.proxy.table import Table
from crust.proxy.target import TargetRow
from tests.support.nodes.tables import Bench
from tests.support.raised import raised
from tests.support.records import records

RECORD = records.a_record()
ALONE = DeviceSet.alone(RECORD.identity)


class SlowReader(entry.DirectoryReader):
    """Has read the directory, and returns when the test allows it."""

    entered = threading.Event()
    go_on = threading.Event()

    def look(self) -> entry.DirectoryReading:
        seen = super().look()
        self.entered.set()
        assert self.go_on.wait(20)
        return seen


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[SlowReader]]:
    SlowReader.entered, SlowReader.go_on = threading.Event(), threading.Event()
    monkeypatch.setattr("crust.handoff.entry.DirectoryReader", SlowReader)
    yield SlowReader
    SlowReader.go_on.set()


def _publish(bench: Bench, record: Record) -> None:
    """Write an entry, as a publish does."""
    bench.table.put(bench.entries.row_of(bench.entries.store.write(record)))


def row(record: Record, devices: DeviceSet = ALONE) -> TargetRow:
    """A row that reserves a record's volume and a device."""
    return TargetRow(record.digest, record.target.text, key=record.key, devices=devices)


async def test_publish_during_a_look_stays(slow: type[SlowReader], bench: Bench) -> None:
    looking = asyncio.create_task(bench.reconciler().look())
    await asyncio.to_thread(slow.entered.wait, 20)
    await asyncio.to_thread(_publish, bench, RECORD)
    slow.go_on.set()
    await looking
    assert bench.table.find(RECORD.target.text) == RECORD
    assert [row.record for row in bench.table.of(RECORD.key)] == [RECORD]


async def test_unpublish_during_a_look_stays_gone(slow: type[SlowReader], bench: Bench) -> None:
    bench.store.write(RECORD)
    looking = asyncio.create_task(bench.reconciler().look())
    await asyncio.to_thread(slow.entered.wait, 20)
    with bench.store.begin_removal(RECORD.target) as unpublish:
        unpublish.complete()
    bench.table.drop(RECORD.digest)
    slow.go_on.set()
    await looking
    assert bench.table.find(RECORD.target.text) is None
    assert bench.table.of(RECORD.key) == ()


async def test_row_of_an_operation_is_left_to_the_next_look(bench: Bench) -> None:
    """The publish began before the look, and has neither guard nor entry yet: its reservation must not go."""
    reconciler, busy = bench.reconciler(), replace(row(RECORD), busy=True)
    bench.table.put(busy)
    for _ in range(2):
        await reconciler.look()
    assert bench.table.at(RECORD.target.text) == busy
    bench.table.put(replace(busy, busy=False))
    bench.store.write(RECORD)
    await reconciler.look()
    assert bench.table.find(RECORD.target.text) == RECORD


async def test_look_reads_what_the_last_one_skipped(slow: type[SlowReader], bench: Bench) -> None:
    """A publish in every look: it neither makes a look begin again, nor is anything lost."""
    bench.store.write(RECORD)
    reconciler = bench.reconciler()
    for number in range(3):
        slow.entered.clear()
        slow.go_on.clear()
        looking = asyncio.create_task(reconciler.look())
        await asyncio.to_thread(slow.entered.wait, 20)
        other = _other_volume(records.a_record(f"/var/lib/kubelet/{number}"))
        await asyncio.to_thread(_publish, bench, other)
        slow.go_on.set()
        await looking
    assert len(bench.table.entries()) == 4
    os.rename(bench.store.layout.entry(RECORD.target).directory, f"{bench.store.root}/../moved")
    await reconciler.look()
    assert bench.table.find(RECORD.target.text) is None
    assert len(bench.table.entries()) == 3


async def test_look_at_rest_reads_only_a_few_entries_in_turn(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among them, after some looks, one that was damaged in place: its directory has not changed."""
    monkeypatch.setattr(entry, "FRESH_NS", 0)
    reconciler = bench.reconciler()
    for number in range(20):
        bench.store.write(_other_volume(records.a_record(f"/var/lib/kubelet/{number}")))
    assert len(await reconciler.look()) == 20
    damaged = bench.store.layout.entry(volumes.TargetPath("/var/lib/kubelet/7"))
    before = os.stat(damaged.directory).st_mtime_ns
    Path(damaged.record).write_text("{")
    assert os.stat(damaged.directory).st_mtime_ns == before
    # one more than a round: in the order of the directory the damaged entry may have the last turn
    read = [await reconciler.look() for _ in range(20 // entry.IN_TURN + 1)]
    assert max(len(names) for names in read) == entry.IN_TURN + 1  # one is damaged, each time
    with pytest.raises(errors.Corrupt, match="cannot be read"):
        bench.table.find("/var/lib/kubelet/7")


@pytest.mark.parametrize("first", ["disk", "partition"])
def test_partition_and_its_disk_are_one_reservation_whichever_comes_first(first: str) -> None:
    table = Table()
    disk, partition = volumes.DeviceIdentity(8, 0, 5), volumes.DeviceIdentity(8, 1, 5)
    sets = {
        "disk": DeviceSet(frozenset({disk}), frozenset({disk, partition})),
        "partition": DeviceSet(frozenset({partition}), frozenset({disk, partition})),
    }
    neighbour = volumes.DeviceIdentity(8, 2, 5)
    other = DeviceSet(frozenset({neighbour}), frozenset({neighbour, disk}))
    table.reserve(row(RECORD, sets.pop(first)))
    (second,) = sets.values()
    wanted = _other_volume(records.a_record("/var/lib/kubelet/two"))
    with raised("DeviceReserved"):
        table.reserve(row(wanted, second))
    if first == "partition":
        table.reserve(row(wanted, other))


def test_row_with_a_new_device_releases_the_old_one() -> None:
    table = Table()
    table.reserve(row(RECORD))
    moved = DeviceSet.alone(volumes.DeviceIdentity(7, 9, 99))
    table.reserve(row(RECORD, moved))
    wanted = row(_other_volume(records.a_record("/var/lib/kubelet/two")))
    table.check_reservation(wanted)
    with raised("DeviceReserved"):
        table.check_reservation(replace(wanted, devices=moved))


@pytest.mark.spec("H-41")
def test_only_a_repeat_with_its_entry_passes_an_unreadable_one() -> None:
    """Over a bare guard nobody knows which device the driver answers, and the unreadable entry may have it."""
    table = Table()
    unreadable = entry.Entry("0" * 64, "/e/0", None, errors.Corrupt("damaged"))
    table.put(TargetRow(unreadable.digest, "/var/lib/kubelet/other", unreadable))
    guarded = row(RECORD)
    table.put(guarded)
    with raised("ReservedByUnreadableEntry", match="/e/0"):
        table.check_reservation(guarded)
    table.put(replace(guarded, entry=entry.Entry(RECORD.digest, "/e/1", RECORD)))
    table.check_reservation(guarded)


def test_file_of_another_program_in_the_root_refuses_nothing() -> None:
    table = Table()
    foreign = entry.Entry("notes.txt", "/e/notes.txt", None, entry.UnknownHandoffFile("/e/notes"))
    table.put(TargetRow(foreign.digest, entry=foreign))
    table.reserve(row(RECORD))


def _other_volume(record: Record) -> Record:
    return record.replaced(volume_id="vol-2")
