"""What a handler's answer may be: bounded in bytes, lines and text."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from crust.core import credentials, errors, volumes
from crust.proxy import handler_calls
from crust.proxy.handlers import RegisteredHandler
from crust.rpc import channel
from crust.rpc.messages import crust_v1
from crust.rpc.port import SocketPort
from crust.wire.v1 import inspect_pb2
from tests.support.faults.refusals import refused
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places
from tests.support.runtimes.hostile_handler import Hostile, serving

TARGET = volumes.TargetPath("/a")


@asynccontextmanager
async def asked(
    places: Places, hostile: Hostile
) -> AsyncIterator["asyncio.Task[volumes.VolumeStats]"]:
    path = f"{places.root}/h.sock"
    port = SocketPort(path, answer_max_bytes=channel.HANDLER_ANSWER_MAX_BYTES)
    handler = RegisteredHandler(
        volumes.HandlerName("kata"), "1", path, frozenset({"ext4"}), port=port
    )
    async with serving(path, hostile), port:
        yield asyncio.create_task(handler_calls.stats(handler, TARGET, 60))


async def test_silent_handler_is_a_problem_until_it_answers(
    node: FakeNode, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler_calls, "STATS_TIMEOUT_S", 0.05)
    async with node.gated_handler(target) as (_, gate):
        with node.sandbox(target, name="box-1"):
            await refused(node.co.stats("vol-1", target), grpc.StatusCode.UNAVAILABLE)
            assert await _problems(node) == [("runtime handler kata", "HandlerNotResponding")]
            gate.opened.set()
            monkeypatch.setattr(handler_calls, "STATS_TIMEOUT_S", 60)
            await node.co.stats("vol-1", target)
            assert await _problems(node) == []


async def _problems(node: FakeNode) -> list[tuple[str, str]]:
    answer = await node.inspect.GetHealth(inspect_pb2.GetHealthRequest())
    return [(condition.component, condition.error_name) for condition in answer.conditions]


async def test_answer_of_a_megabyte_is_refused_unread(places: Places) -> None:
    async with asked(places, Hostile(lines=200_000)) as stats:  # type: ignore[abstract]
        with pytest.raises(errors.Exhausted, match="larger than the limit") as caught:
            await stats
    assert caught.value.error_name == "AnswerTooLarge"


async def test_statistics_of_many_lines_are_implausible(places: Places) -> None:
    async with asked(places, Hostile(lines=crust_v1.USAGES_MAX + 1)) as stats:  # type: ignore[abstract]
        with pytest.raises(crust_v1.ImplausibleStats, match="9 lines of usage"):
            await stats
    async with asked(places, Hostile(lines=crust_v1.USAGES_MAX)) as stats:  # type: ignore[abstract]
        assert len((await stats).usage) == crust_v1.USAGES_MAX


async def test_text_of_a_handlers_status_is_cut(places: Places) -> None:
    async with asked(places, Hostile(text="--key-" * 50_000)) as stats:  # type: ignore[abstract]
        with pytest.raises(errors.RuntimeFailed) as caught:
            await stats
    assert len(str(caught.value)) <= credentials.SHOWN_MAX_CHARS


async def test_text_of_a_volumes_condition_is_cut(places: Places) -> None:
    async with asked(places, Hostile(lines=1, condition="x" * 100_000)) as stats:  # type: ignore[abstract]
        condition = (await stats).condition
    assert condition is not None
    assert len(condition.message) == credentials.SHOWN_MAX_CHARS


async def test_hostile_text_of_a_handler_reaches_log_and_co_cut(
    node: FakeNode, target: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with node.deferred(target):
        with node.sandbox(target, name="box-1"):
            async with serving(node.places.handler, Hostile(text="--key-" * 50_000)):  # type: ignore[abstract]
                await refused(node.co.stats("vol-1", target), grpc.StatusCode.INTERNAL, "--key-")
    logged = [vars(record)["error"] for record in caplog.records if "error" in vars(record)]
    assert any("--key-" in str(text) for text in logged)
    assert max(len(str(text)) for text in logged) <= credentials.SHOWN_MAX_CHARS
