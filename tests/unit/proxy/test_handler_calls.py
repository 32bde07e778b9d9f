"""What the proxy lets a handler do and say: bounded answers, work in the guest, the health of a volume."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from crust.core import credentials, errors, volumes
from crust.proxy import handler_calls
from crust.proxy.handlers import Handler
from crust.proxy.runtime_api import REASON
from crust.rpc import channel, status
from crust.rpc.call import Call
from crust.rpc.messages import crust_v1
from crust.rpc.port import SocketPort
from crust.rpc.status import PeerStatus
from crust.runtime_handler.registration import Feature
from crust.wire.csi.v1 import csi_pb2
from crust.wire.v1 import handlers_pb2, handlers_pb2_grpc, types_pb2
from tests.support.faults.refusals import refused
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places
from tests.support.runtimes.fake_handler import ALL_FEATURES, FakeHandler

TARGET = volumes.TargetPath("/a")
UNBOUNDED = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 1 << 22),
    ("grpc.absolute_max_metadata_size", 1 << 22),
]


class Hostile(handlers_pb2_grpc.RuntimeHandlerServicer):
    """Answers with so many lines of usage, or with a text."""

    def __init__(self, *, lines: int = 0, text: str = "", condition: str = "") -> None:
        self._lines = lines
        self._text = text
        self._condition = condition

    async def GetVolumeStats(self, request: Any, context: Any) -> Any:
        if self._text:
            await context.abort(grpc.StatusCode.INTERNAL, self._text)
        line = types_pb2.VolumeUsage(unit=types_pb2.VolumeUsage.BYTES, total=1, used=1)
        one = handlers_pb2.GetVolumeStatsResponse(usage=[line]).SerializeToString()
        answer = handlers_pb2.GetVolumeStatsResponse.FromString(one * self._lines)
        if self._condition:
            answer.volume_condition.message = self._condition
        return answer


@asynccontextmanager
async def serving(path: str, hostile: Hostile) -> AsyncIterator[None]:
    server = grpc.aio.server(options=UNBOUNDED)
    handlers_pb2_grpc.add_RuntimeHandlerServicer_to_server(hostile, server)
    server.add_insecure_port(f"unix:{path}.bound")
    await server.start()
    os.rename(f"{path}.bound", path)
    try:
        yield
    finally:
        await server.stop(None)


@asynccontextmanager
async def asked(
    places: Places, hostile: Hostile
) -> AsyncIterator["asyncio.Task[volumes.VolumeStats]"]:
    path = f"{places.root}/h.sock"
    port = SocketPort(path, answer_max_bytes=channel.HANDLER_ANSWER_MAX_BYTES)
    handler = Handler(volumes.HandlerName("kata"), "1", path, frozenset({"ext4"}), port=port)
    async with serving(path, hostile), port:
        yield asyncio.create_task(handler_calls.stats(handler, TARGET, 60))


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


async def test_status_text_of_peer_is_cut_to_what_passes(places: Places) -> None:
    path = f"{places.root}/h.sock"
    async with serving(path, Hostile(text="ä" * 100_000)), SocketPort(path) as port:  # type: ignore[abstract]
        with pytest.raises(PeerStatus) as caught:
            await port.answer(Call("/crust.v1.RuntimeHandler/GetVolumeStats", (), 60), b"")
    assert caught.value.code is grpc.StatusCode.INTERNAL
    assert caught.value.text.encode() == "ä".encode() * (status.PEER_TEXT_MAX_BYTES // 2)


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


Code = grpc.StatusCode
LOST = csi_pb2.VolumeHealth.VolumeHealthEntry(
    status=csi_pb2.DATA_LOSS, reason="ImageMissing", message="the image is gone"
)
READ_ONLY = volumes.VolumeCondition(abnormal=True, message="remounted read-only")
AWAY = errors.PeerUnavailable("the guest", why="it hangs")


async def reported(node: FakeNode, volume_id: str, target: str) -> dict[str, str]:
    """Reason to message."""
    request = csi_pb2.NodeGetVolumeHealthRequest(volume_id=volume_id, volume_publish_path=target)
    health = (await node.co.node.NodeGetVolumeHealth(request, timeout=10)).volume_health
    assert health.volume_id == volume_id
    return {entry.reason: entry.message for entry in health.health_statuses}


@pytest.mark.spec("D-40")
async def test_health_is_the_drivers_and_the_guests(node: FakeNode, target: str) -> None:
    async with node.in_sandbox(target) as fake:
        assert await reported(node, "vol-1", target) == {}
        fake.condition = READ_ONLY
        assert await reported(node, "vol-1", target) == {REASON: "remounted read-only"}
        node.driver.node.findings = [LOST]
        assert set(await reported(node, "vol-1", target)) == {REASON, "ImageMissing"}
        assert set(await reported(node, "vol-1", "")) == {REASON, "ImageMissing"}


@pytest.mark.spec("D-40")
async def test_health_without_an_answer_of_the_guest_is_an_error(
    node: FakeNode, target: str
) -> None:
    async with node.in_sandbox(target, FakeHandler(error=AWAY)):
        await refused(reported(node, "vol-1", target), Code.UNAVAILABLE, "it hangs")
        node.driver.node.findings = [LOST]
        assert set(await reported(node, "vol-1", target)) == {"ImageMissing"}


async def test_health_without_a_sandbox_is_the_drivers(node: FakeNode, target: str) -> None:
    async with node.deferred(target, FakeHandler(error=AWAY)):
        assert await reported(node, "vol-1", target) == {}
        assert await reported(node, "vol-2", node.places.target("two")) == {}


async def test_handler_without_the_feature_is_not_asked(node: FakeNode, target: str) -> None:
    features = ALL_FEATURES - {Feature.HEALTH, Feature.STATS}
    async with node.in_sandbox(target, FakeHandler(error=AWAY), features=features):
        assert await reported(node, "vol-1", target) == {}
        await refused(
            node.co.stats("vol-1", target), Code.FAILED_PRECONDITION, "does not offer STATS"
        )
