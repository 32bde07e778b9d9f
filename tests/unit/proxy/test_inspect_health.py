"""The proxy's own health, its events, and what it logs of a call."""

import asyncio
import io
import json
import os
import threading
from typing import Any

import grpc
import pytest

from crust.core import errors, logs
from crust.handoff import entry
from crust.handoff.store import Store
from crust.host.process import workers
from crust.host.process.workers import Workers
from crust.inspection import show
from crust.proxy import look
from crust.proxy.table import QUEUE_LENGTH, Event, Events
from crust.rpc import channel
from crust.rpc.serving import server, worker_watch
from crust.wire.v1 import inspect_pb2
from tests.support.co import Co
from tests.support.faults.refusals import refused, until_probe
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places


async def _condition(node: FakeNode) -> inspect_pb2.GetHealthResponse.Condition:
    async with asyncio.timeout(60):
        while True:
            answer = await node.inspect.GetHealth(inspect_pb2.GetHealthRequest())
            if answer.conditions:
                return answer.conditions[0]
            await asyncio.sleep(0.01)


async def test_removed_socket_is_shown_and_fails_the_probe(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CHECK_S", 0.01)
    async with FakeNode(places) as node:
        await node.co.is_ready()
        assert (await show.answer(places.run, show.status)).names == ("handlers",)
        os.unlink(places.sockets.runtime)
        condition = await _condition(node)
        assert condition.part == f"socket {places.sockets.runtime}"
        assert condition.error_name == "SocketLost"
        shown = await show.answer(places.run, show.status)
        assert f"socket {places.sockets.runtime}" in shown.names
        assert "SocketLost" in shown.rendered("table").plain
        await refused(
            node.co.is_ready(),
            grpc.StatusCode.FAILED_PRECONDITION,
            places.sockets.runtime,
            "restart this process",
        )


Code = grpc.StatusCode


class HangingReads:
    """Reads of entries that hang, on threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released = threading.Event()
        self.hung = 0
        self.is_hanging = False
        read = Store.read

        def hang(store: Store, *args: object) -> object:
            if self.is_hanging:
                self.hung += 1
                self.released.wait()
            return read(store, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(Store, "read", hang)


async def test_proxy_whose_looks_at_claims_hang_is_unhealthy(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_watch, "CHECK_S", 0.01)
    reads, threads = HangingReads(monkeypatch), Workers("the proxy", limit=2)
    async with FakeNode(places, threads=threads) as node, node.handler():
        targets = [places.target(name) for name in ("one", "two")]
        for number, target in enumerate(targets):
            await node.co.publish(f"vol-{number}", target)
        reads.is_hanging = True
        try:
            for number, target in enumerate(targets):
                for _ in range(5):
                    with pytest.raises(grpc.aio.AioRpcError):
                        await Co(node.co.channel, 0.3).stats(f"vol-{number}", target)
                assert reads.hung == number + 1
                if not number:  # a thread is left
                    await Co(node.co.channel).is_ready()
            monkeypatch.setattr(workers, "FREE_WITHIN_S", 0.01)
            await until_probe(node.co.channel, Code.UNAVAILABLE, "[NoWorkerFree] the proxy ")
            health = await node.inspect.GetHealth(inspect_pb2.GetHealthRequest(), timeout=60)
            assert "NoWorkerFree" in [condition.error_name for condition in health.conditions]
            listed = inspect_pb2.ListDeferredVolumesRequest()
            assert len((await node.inspect.ListDeferredVolumes(listed, timeout=60)).volumes) == 2
        finally:
            monkeypatch.setattr(workers, "FREE_WITHIN_S", 30)
            reads.released.set()
        await until_probe(node.co.channel, Code.OK)


async def test_look_that_hangs_is_shown_until_it_ends(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look, "_LATE_S", 0.01)
    goes_on, look_at = threading.Event(), entry.Looks.look

    def hang(looks: entry.Looks) -> entry.Look:
        assert goes_on.wait(60)
        return look_at(looks)

    async with FakeNode(places) as node:
        with monkeypatch.context() as patched:
            patched.setattr(entry.Looks, "look", hang)
            try:
                condition = await _condition(node)
                assert condition.part == "looks at the handoff directory"
                assert condition.error_name == "LookHangs"
                await node.co.is_ready()
            finally:
                goes_on.set()
        listed = inspect_pb2.ListDeferredVolumesRequest()
        await node.inspect.ListDeferredVolumes(listed, timeout=60)
        assert not (await node.inspect.GetHealth(inspect_pb2.GetHealthRequest())).conditions


async def test_watcher_that_leaves_leaves_no_task() -> None:
    events, before = Events(), asyncio.all_tasks()
    for _ in range(5):
        async with events.watch() as watch:
            waiting = asyncio.ensure_future(anext(watch))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            await watch.aclose()  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_every_watcher_gets_all_events_since_its_start() -> None:
    events = Events()
    events.emit(Event("before"))
    async with events.watch() as one, events.watch() as two:
        streams = one, two
        events.emit(Event("first"))
        events.emit(Event("second"))
        for stream in streams:
            assert [(await anext(stream)).kind for _ in range(2)] == ["first", "second"]
            await stream.aclose()  # type: ignore[attr-defined]


async def test_slow_watcher_gets_the_number_of_dropped_events() -> None:
    events = Events()
    async with events.watch() as watch:
        for number in range(QUEUE_LENGTH + 5):
            events.emit(Event(f"k{number}"))
        heard = [await anext(watch) for _ in range(QUEUE_LENGTH + 1)]
        assert heard[-1].kind == "missed"
        assert heard[-1].message.startswith("5 events")
        events.end()
        assert await _all(watch) == []


@pytest.mark.parametrize("waiting", [0, QUEUE_LENGTH])
async def test_end_of_events_ends_every_watch(waiting: int) -> None:
    events = Events()
    async with events.watch() as watch, events.watch() as later:
        heard = asyncio.create_task(_all(watch))
        await asyncio.sleep(0)
        for _ in range(waiting):
            events.emit(Event("k"))
        events.end()
        assert len(await heard) <= 1
        assert await _all(later) == []


async def _all(stream: object) -> list[Event]:
    return [answer async for answer in stream]  # type: ignore[attr-defined]


Lines = list[dict[str, Any]]


@pytest.fixture
def stream(logging_restored: None) -> io.StringIO:
    written = io.StringIO()
    logs.configure(fmt="json", stream=written)
    return written


async def served(stream: io.StringIO, rpc: str) -> Lines:
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [line for line in lines if line["message"] == "served" and line["rpc"] == rpc]


async def test_publish_has_one_request_id_in_proxy_shim_and_driver(
    kata: FakeNode, target: str, stream: io.StringIO
) -> None:
    await kata.co.publish("vol-1", target)
    lines = await served(stream, "NodePublishVolume")
    assert {line["server"] for line in lines} >= {"csi", "shim"}
    (request_id,) = {line["request_id"] for line in lines}
    (call,) = kata.driver.called("NodePublishVolume")
    assert dict(call.metadata)["crust-request-id"] == request_id
    assert {(line["volume_id"], line["target"]) for line in lines} == {("vol-1", target)}
    assert {line["driver"] for line in lines if line["server"] == "csi"} == {kata.driver.name}
    await kata.co.publish("vol-1", target)
    assert len({line["request_id"] for line in await served(stream, "NodePublishVolume")}) == 2


async def test_statistics_have_one_request_id_as_far_as_the_handler(
    kata: FakeNode, published: str, stream: io.StringIO
) -> None:
    with kata.sandbox(published):
        await kata.co.stats("vol-1", published)
    (asked,) = {line["request_id"] for line in await served(stream, "NodeGetVolumeStats")}
    (runtime,) = await served(stream, "RuntimeGetVolumeStats")
    (handler,) = await served(stream, "GetVolumeStats")
    for line in (runtime, handler):
        assert (line["request_id"], line["volume_id"], line["target"], line["driver"]) == (
            asked,
            "vol-1",
            published,
            kata.driver.name,
        )


async def test_driver_that_is_away_is_named(places: Places, stream: io.StringIO) -> None:
    async with FakeNode(places, parts=("shim",)), channel.connect(places.shim) as to_shim:
        await refused(
            Co(to_shim).unpublish("vol-1", "/t"),
            grpc.StatusCode.UNAVAILABLE,
            f"[PeerNotReachable] the process that serves {places.driver} cannot be reached",
            "there is no such socket; start it",
        )
    (line,) = await served(stream, "NodeUnpublishVolume")
    assert (line["level"], line["volume_id"], line["target"]) == ("warning", "vol-1", "/t")
    assert "failed to connect" not in line["error"]


class GuestLost(errors.PeerUnavailable):
    """An error of a runtime that crust does not know."""


async def test_error_of_a_handler_keeps_its_name(node: FakeNode, target: str) -> None:
    async with node.deferred(target) as fake:
        fake.error = GuestLost("the guest does not answer", hint="look at its console")
        with node.sandbox(target), pytest.raises(grpc.aio.AioRpcError) as caught:
            await node.co.stats("vol-1", target)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "[GuestLost] the guest does not answer; look at its console"
    assert not [key for key, _ in caught.value.trailing_metadata() if "details" in key]
