"""What is lost behind an entry is restored, or reported: the guard mount, the device."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from crust import errors, supervised, volumes
from crust.handoff import store
from crust.proxy.deferrals import handoff_watch
from crust.proxy.deferrals.deferred import DeferredVolumes
from crust.proxy.deferrals.events import Events
from crust.rpc.serving.health import Health
from crust.wire.v1 import inspect_pb2
from tests.support.nodes.fake_targets import GUARD, FakeDevices
from tests.support.nodes.node import Node


def _touch(node: Node, target: str) -> None:
    """Whatever changes an entry causes a look."""
    entry = node.entry(target)
    assert entry is not None
    os.utime(entry.directory)


@asynccontextmanager
async def _events(node: Node) -> AsyncIterator[Callable[[str], Awaitable[str]]]:
    """Wait for the next event of a kind, and return its target path."""
    watch: Any = node.inspect.Watch(inspect_pb2.WatchRequest(), timeout=60)
    await watch.initial_metadata()

    async def next_of(kind: str) -> str:
        while (event := await watch.read()).kind != kind:
            pass
        return str(event.target_path)

    yield next_of
    watch.cancel()


async def _problems(node: Node) -> list[str]:
    answer = await node.inspect.GetHealth(inspect_pb2.GetHealthRequest(), timeout=10)
    return [each.part for each in answer.conditions]


async def test_lost_guard_mount_is_restored_and_reported(kata: Node) -> None:
    target = kata.places.target("one")
    await kata.co.publish("vol-1", target)
    async with _events(kata) as next_of:
        os.unlink(f"{target}/{GUARD}")
        _touch(kata, target)
        assert await next_of("guard-restored") == target
    kata.check_published("vol-1", target)
    await kata.co.unpublish("vol-1", target)
    kata.check_untouched(target)


async def test_guard_that_cannot_be_restored_is_reported_until_it_is(kata: Node) -> None:
    target = kata.places.target("one")
    await kata.co.publish("vol-1", target)
    async with _events(kata) as next_of:
        os.unlink(f"{target}/{GUARD}")
        kata.targets.foreign.add(target)
        _touch(kata, target)
        assert await next_of("unhealthy") == target
        assert await _problems(kata) == [f"guard mount of {target}"]
        kata.targets.foreign.clear()
        _touch(kata, target)
        assert await next_of("healthy") == target
    assert await _problems(kata) == []
    assert kata.targets.has_guard(volumes.TargetPath(target))


async def test_device_that_is_another_one_now_is_reported_until_the_volume_is_unpublished(
    kata: Node,
) -> None:
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


@pytest.mark.parametrize("failures", [3, None])
async def test_looks_that_fail_are_tried_again_and_end_the_process_if_they_keep_failing(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    failures: int | None,
) -> None:
    """Not only errors of crust's own: no thread can be started, no memory is left."""
    monkeypatch.setattr(supervised, "ATTEMPTS", 5)
    monkeypatch.setattr(supervised, "_FIRST_PAUSE_S", 0.001)
    directory = store.Store(str(tmp_path_factory.mktemp("run") / "volumes"))
    directory.open()
    deferred = DeferredVolumes(directory, FakeDevices())
    looked, looks = asyncio.Event(), 0

    async def look() -> tuple[Any, ...]:
        nonlocal looks
        looks += 1
        if failures is None or looks <= failures:
            raise RuntimeError("can't start new thread")
        looked.set()
        return ()

    monkeypatch.setattr(deferred, "look", look)
    ended: asyncio.Queue[errors.CrustError] = asyncio.Queue()
    async with (
        asyncio.timeout(60),
        handoff_watch.watch_handoff(
            directory, deferred, Events(), Health(), end=ended.put_nowait, rescan_s=0.01
        ),
    ):
        if failures is None:
            assert "can't start new thread" in str(await ended.get())
        else:
            await looked.wait()
            assert ended.empty()
