"""The looks: claims become events, and what is lost behind an entry is restored or reported."""

import asyncio
import datetime
import itertools
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from crust.core import errors, supervised, volumes
from crust.handoff import entry, watch
from crust.handoff.claims import Claim, State
from crust.proxy import look
from crust.proxy.table import Event, Events
from crust.proxy.target import Guard
from crust.wire.v1 import inspect_pb2
from tests.support.faults.refusals import refused
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.fake_targets import GUARD, FakeTargets
from tests.support.nodes.hanging_targets import HangingTargets, running
from tests.support.nodes.places import Places
from tests.support.nodes.tables import Bench
from tests.support.records import records
from tests.support.runtimes import fake_handler

Code = grpc.StatusCode


def _touch(node: FakeNode, target: str) -> None:
    """Whatever changes an entry causes a look."""
    entry = node.entry(target)
    assert entry is not None
    os.utime(entry.directory)


@asynccontextmanager
async def _events(node: FakeNode) -> AsyncIterator[Callable[[str], Awaitable[str]]]:
    """Wait for the next event of a kind, and return its target path."""
    watch: Any = node.inspect.Watch(inspect_pb2.WatchRequest(), timeout=60)
    await watch.initial_metadata()

    async def next_of(kind: str) -> str:
        while (event := await watch.read()).kind != kind:
            pass
        return str(event.target_path)

    yield next_of
    watch.cancel()


async def _problems(node: FakeNode) -> list[str]:
    answer = await node.inspect.GetHealth(inspect_pb2.GetHealthRequest(), timeout=10)
    return [condition.component for condition in answer.conditions]


async def test_guard_that_cannot_be_restored_is_reported(kata: FakeNode, published: str) -> None:
    await _look(kata)
    async with _events(kata) as next_of:
        os.unlink(f"{published}/{GUARD}")
        kata.targets.foreign.add(published)
        _touch(kata, published)
        assert await next_of("unhealthy") == published
        assert await _problems(kata) == [f"guard mount of {published}"]
        kata.targets.foreign.clear()
        _touch(kata, published)
        assert await next_of("healthy") == published
    assert await _problems(kata) == []
    assert kata.targets.has_guard(volumes.TargetPath(published))


async def test_exchanged_device_is_reported_until_the_volume_is_unpublished(kata: FakeNode) -> None:
    target, other = kata.places.target("one"), kata.places.target("two")
    await kata.co.publish("vol-1", target)
    async with _events(kata) as next_of:
        kata.driver.identities["vol-1"] = (7, 1, 99)
        _touch(kata, target)
        assert await next_of("unhealthy") == target
        assert await _problems(kata) == [f"device of {target}"]
        await kata.co.unpublish("vol-1", target)
        await kata.co.publish("vol-2", other)
        _touch(kata, other)
        assert await next_of("healthy") == target
    assert await _problems(kata) == []


async def test_device_that_hangs_is_reported_and_stops_no_look(
    kata: FakeNode, published: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look, "_HANG_S", 0.01)
    other, goes_on, identify = kata.places.target("two"), threading.Event(), kata.devices.identify
    await kata.co.publish("vol-2", other)

    def hang(path: str) -> volumes.DeviceIdentity:
        assert not path.endswith("vol-1") or goes_on.wait(60)
        found: volumes.DeviceIdentity = identify(path)
        return found

    async with _events(kata) as next_of:
        monkeypatch.setattr(kata.devices, "identify", hang)
        _touch(kata, published)
        assert await next_of("unhealthy") == published
        os.unlink(f"{other}/{GUARD}")
        _touch(kata, other)
        assert await next_of("guard-restored") == other
        assert await _problems(kata) == [f"device of {published}"]
        goes_on.set()
        _touch(kata, published)
        assert await next_of("healthy") == published


@pytest.mark.spec("H-38", "H-39")
async def test_lost_guard_is_restored_with_the_group_that_was_seen(
    kata: FakeNode, published: str
) -> None:
    kata.targets.groups[published] = 3000
    await _look(kata)
    async with _events(kata) as next_of:
        os.unlink(f"{published}/{GUARD}")
        kata.targets.groups.clear()
        kata.targets.named.clear()
        _touch(kata, published)
        assert await next_of("guard-restored") == published
    assert kata.targets.guard_at(volumes.TargetPath(published)) == Guard(3000, names=True)
    assert await _problems(kata) == []
    kata.check_published("vol-1", published)


async def test_guard_without_its_entry_is_reported_until_it_is_back(
    kata: FakeNode, published: str
) -> None:
    """Somebody moved the entry away, and a virtual machine may go on with the volume."""
    entry = kata.entry(published)
    assert entry is not None
    os.rename(entry.directory, f"{kata.places.root}/moved")
    assert await _look(kata) == [f"entry of {published}"]
    os.rename(f"{kata.places.root}/moved", entry.directory)
    assert await _look(kata) == []
    os.rename(entry.directory, f"{kata.places.root}/moved")
    assert await _look(kata) == [f"entry of {published}"]
    await kata.co.unpublish("vol-1", published)
    assert await _look(kata) == []


async def test_guard_lost_before_its_group_is_reported(places: Places, target: str) -> None:
    """The first look of a proxy that was started finds the target open."""
    async with FakeNode(places) as node, node.handler():
        await node.co.publish("vol-1", target)
    os.unlink(f"{target}/{GUARD}")
    async with FakeNode(places, driver=node.driver) as node, node.handler():
        async with _events(node) as next_of:
            while (await _look(node)) != [f"group of {target}"]:
                pass  # the first look has restored it, or is about to
            assert node.targets.has_guard(volumes.TargetPath(target))
            await refused(node.co.publish("vol-1", target), Code.UNAVAILABLE, "GuardGroupUnknown")
            await node.co.unpublish("vol-1", target)
            await _look(node)
            assert await next_of("healthy") == target
        assert await _problems(node) == []


async def _look(node: FakeNode) -> list[str]:
    """Have the proxy look; returns its problems."""
    await node.inspect.ListDeferredVolumes(inspect_pb2.ListDeferredVolumesRequest(), timeout=10)
    return await _problems(node)


async def test_failing_looks_are_repeated_and_end_the_process(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only errors of crust's own: no thread can be started, no memory is left."""
    numbers = itertools.count(1)

    def fail(_: entry.DirectoryReader) -> entry.DirectoryReading:
        raise RuntimeError(f"can't start new thread {next(numbers)}")

    monkeypatch.setattr(supervised, "ATTEMPTS", 5)
    monkeypatch.setattr(supervised, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(entry.DirectoryReader, "look", fail)
    reconciler, ended = bench.reconciler(), asyncio.Queue[errors.CrustError]()
    async with asyncio.timeout(60), reconciler.following(end=ended.put_nowait, rescan_s=0.01):
        assert "can't start new thread 5" in str(await ended.get())


SINCE = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)


def claim(box: str, state: State = State.CLAIMED, *, error: str = "", live: bool = True) -> Claim:
    return Claim(box, "kata", state, error, 7, SINCE, live)


UNNAMED = claim("")
A_BOOTS, A_RUNS = claim("a"), claim("a", State.MOUNTED)
A_FAILED = claim("a", State.ERROR, error="no kernel")
A_ENDED = claim("a", State.ERROR, error="no kernel", live=False)


@pytest.mark.parametrize(
    ("read", "reported"),
    [
        ([None, None], []),
        ([UNNAMED, A_BOOTS, A_BOOTS], ["claimed: sandbox a"]),
        ([A_BOOTS, A_RUNS, A_RUNS], ["claimed: sandbox a", "mounted: sandbox a"]),
        ([A_RUNS], ["claimed: sandbox a", "mounted: sandbox a"]),
        ([A_BOOTS, UNNAMED], ["claimed: sandbox a"]),  # its lock is still held
        ([A_BOOTS, UNNAMED, None], ["claimed: sandbox a", "released: sandbox a"]),
        ([A_BOOTS, A_FAILED], ["claimed: sandbox a", "failed: sandbox a: no kernel"]),
        ([A_BOOTS, A_ENDED], ["claimed: sandbox a", "released: sandbox a: no kernel"]),
        ([A_BOOTS, claim("b")], ["claimed: sandbox a", "released: sandbox a", "claimed: sandbox b"]),
        (
            [A_BOOTS, claim("b", State.ERROR, error="b's")],
            ["claimed: sandbox a", "released: sandbox a", "claimed: sandbox b", "failed: sandbox b: b's"],
        ),
    ],
)  # fmt: skip
async def test_looks_become_the_events_of_what_lies_between(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, read: list[Claim | None], reported: list[str]
) -> None:
    reconciler = bench.reconciler()
    bench.store.write(records.a_record())
    directory = bench.store.layout.entry(records.TARGET).directory
    async with bench.events.watch() as watch:
        for claim_read in read:
            monkeypatch.setattr(entry, "_claim_of", lambda _, read=claim_read: (read, None))
            os.utime(directory)
            await reconciler.look()
        assert await _heard(bench.events, watch) == reported


async def test_unpublish_ends_a_claim_whose_release_no_look_has_seen(bench: Bench) -> None:
    reconciler = bench.reconciler()
    bench.store.write(records.a_record())
    async with bench.events.watch() as watch:
        with fake_handler.sandbox(bench.store.root, records.TARGET.text, name="a"):
            await reconciler.look()
        bench.table.drop(records.TARGET.digest)
        with bench.store.begin_removal(records.TARGET) as unpublish:
            unpublish.complete()
        for _ in range(2):
            await reconciler.look()
        heard = await _heard(bench.events, watch)
    assert heard == ["claimed: sandbox a", "mounted: sandbox a", "released: sandbox a"]


async def _heard(events: Events, watch: AsyncIterator[Event]) -> list[str]:
    events.emit(Event("end"))
    heard: list[str] = []
    async for event in watch:
        if event.kind == "end":
            return heard
        if event.kind in ("claimed", "mounted", "failed", "released"):
            heard.append(f"{event.kind}: {event.message}")
    return heard


async def test_guard_mount_that_hangs_does_not_stop_the_looks(
    places: Places, targets: HangingTargets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look, "_HANG_S", 0.01)
    monkeypatch.setattr(watch, "RESCAN_S", 0.05)
    async with running(places, targets) as node:
        target, other = places.target("one"), places.target("two")
        await node.co.publish("vol-1", target)
        await node.co.publish("vol-2", other)
        targets.hung.add(target)
        for path in (target, other):
            FakeTargets.unmount_guard(targets, volumes.TargetPath(path))
        await asyncio.to_thread(targets.wait_for, target)
        await until_guarded(targets, other)
        assert targets.calls == {target: 1}
        targets.released.set()
        await until_guarded(targets, target)


async def until_guarded(targets: HangingTargets, target: str) -> None:
    await asyncio.to_thread(targets.wait_for_guard, target)
    assert targets.has_guard(volumes.TargetPath(target))
