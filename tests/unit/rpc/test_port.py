"""A port: its two ends behave the same, and parts reach each other by a path."""

import asyncio
import logging
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from crust.core import errors, logs
from crust.rpc import channel
from crust.rpc.call import Call
from crust.rpc.csi_driver import CsiDriver
from crust.rpc.port import Port, SocketPort, stub
from crust.rpc.serving import server
from crust.rpc.serving.server import LocalPort, Ports
from crust.rpc.serving.service import Service, methods_of
from crust.rpc.status import PeerStatus
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support.faults.refusals import refused, repeated

Code = grpc.StatusCode
STATS = "/csi.v1.Node/NodeGetVolumeStats"


class Node:
    """What each call does is its volume id."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}
        self.fields: dict[str, str] = {}
        self.background: asyncio.Task[dict[str, str]] | None = None
        self.remaining_s: float | None = None
        self.entered = asyncio.Event()
        self.ended = asyncio.Event()

    async def NodeGetVolumeStats(self, request: Any, call: Call) -> Any:
        self.metadata = dict(call.metadata)
        if request.volume_id == "second":
            self.fields = dict(logs.context.get() or {})
        if request.volume_id == "background":
            self.background = asyncio.create_task(_fields())
        self.remaining_s = call.time_remaining()
        if request.volume_id == "error":
            raise errors.NotFound("no such volume", hint="look for it")
        if request.volume_id == "abort":
            raise PeerStatus(Code.ABORTED, "later", (("peer", "said"),))
        if request.volume_id == "bug":
            raise ZeroDivisionError
        if request.volume_id == "hang":
            self.entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.ended.set()
        await call.begin((("first", "1"),))
        call.trailing = (("last", "2"),)
        usage = csi_pb2.VolumeUsage(unit=csi_pb2.VolumeUsage.BYTES, total=7)
        return csi_pb2.NodeGetVolumeStatsResponse(usage=[usage])

    async def GetMetadataAllocated(self, request: Any, call: Call) -> AsyncIterator[Any]:
        self.fields = dict(logs.context.get() or {})
        try:
            for number in range(request.max_results):
                yield csi_pb2.GetMetadataAllocatedResponse(volume_capacity_bytes=number)
                if number == 2 and request.snapshot_id == "error":
                    raise errors.Corrupt("broken in the middle")
                if number == 2 and request.snapshot_id == "hang":
                    self.entered.set()
                    await asyncio.Event().wait()
        finally:
            self.ended.set()


async def _fields() -> dict[str, str]:
    return dict(logs.context.get() or {})


@pytest.fixture
def node() -> Node:
    return Node()


def service_of(node: Node) -> Service:
    known = csi_pb2.DESCRIPTOR.services_by_name
    methods = (methods_of(node, known[name]) for name in ("Node", "SnapshotMetadata"))
    return Service("test", *methods)


def local_port(service: Service) -> LocalPort:
    return LocalPort(lambda: service)


@pytest_asyncio.fixture(params=["local", "socket"])
async def port(request: pytest.FixtureRequest, node: Node) -> AsyncIterator[Port]:
    if request.param == "local":
        yield local_port(service_of(node))
        return
    with tempfile.TemporaryDirectory(prefix="crust-") as root:
        served = server.serving(f"{root}/s.sock", service_of(node))
        async with served, SocketPort(f"{root}/s.sock") as to:
            yield to


async def stats(to: Port, volume_id: str = "", timeout: float = 20) -> Any:
    request = csi_pb2.NodeGetVolumeStatsRequest(volume_id=volume_id)
    return await stub(csi_pb2_grpc.NodeStub, to).NodeGetVolumeStats(request, timeout=timeout)


def allocated(to: Port, snapshot_id: str = "", count: int = 5) -> Any:
    request = csi_pb2.GetMetadataAllocatedRequest(snapshot_id=snapshot_id, max_results=count)
    calls = stub(csi_pb2_grpc.SnapshotMetadataStub, to)
    return calls.GetMetadataAllocated(request, timeout=20)


async def test_answer_metadata_and_deadline_travel_both_ways(port: Port, node: Node) -> None:
    call = Call(STATS, (("asked", "yes"),), 9)
    data = await port.answer(call, b"")
    assert csi_pb2.NodeGetVolumeStatsResponse.FromString(data).usage[0].total == 7
    assert (dict(call.initial), dict(call.trailing)) == ({"first": "1"}, {"last": "2"})
    assert node.metadata["asked"] == "yes"
    assert node.remaining_s is not None
    # gRPC counts from a clock that it reads once per turn: a little more than 9 is right
    assert 0 < node.remaining_s < 10


async def test_stream_has_its_fields_and_its_reader_its_own(port: Port, node: Node) -> None:
    async for _ in allocated(port, "snap"):
        assert logs.context.get() is None
        assert node.fields["snapshot_id"] == "snap"
    assert logs.context.get() is None


async def test_task_of_a_call_keeps_its_fields_alone(port: Port, node: Node) -> None:
    """A background task has a copy of the context: what a call leaves behind must not reach the next one."""
    await stats(port, "background")
    assert node.background is not None
    assert logs.context.get() is None
    await stats(port, "second")
    fields = await node.background
    assert fields["volume_id"] == "background"
    assert node.fields["volume_id"] == "second"
    assert logs.context.get() is None


async def test_errors_become_statuses(port: Port) -> None:
    await refused(stats(port, "error"), Code.NOT_FOUND, "[NotFound] no such volume", "look for it")
    await refused(stats(port, "bug"), Code.INTERNAL, "UnexpectedError")


async def test_status_of_a_peer_has_code_text_and_metadata(port: Port) -> None:
    with pytest.raises(PeerStatus) as caught:
        await stats(port, "abort")
    assert (caught.value.code, caught.value.text) == (Code.ABORTED, "later")
    assert dict(caught.value.trailing)["peer"] == "said"


class Garbled(Port):
    """A peer whose answers are no messages."""

    connection = 1

    def is_connected(self) -> bool:
        return True

    async def answer(self, call: Call, data: bytes) -> bytes:
        return b"\xff"

    async def stream(self, call: Call, data: bytes) -> AsyncGenerator[bytes, None]:
        yield b"\xff"

    async def forward(self, call: Call, data: bytes) -> bytes:
        return await self.answer(call, data)

    async def aclose(self) -> None:
        """Nothing is open."""


async def test_answer_that_is_no_message_leaves_the_outcome_open() -> None:
    """The peer may have done what it was asked."""
    words = ("[AnswerUnreadable]", "NodeGetVolumeStats")
    await refused(stats(Garbled()), Code.UNAVAILABLE, *words)
    with pytest.raises(PeerStatus, match="GetMetadataAllocated"):
        await anext(allocated(Garbled()))
    driver = CsiDriver(Garbled())
    await refused(driver.name(), Code.UNAVAILABLE, "[AnswerUnreadable]", "GetPluginInfo")


async def test_unknown_method_is_unimplemented(port: Port) -> None:
    await refused(port.answer(Call("/csi.v1.Node/Nothing", (), 20), b""), Code.UNIMPLEMENTED)


async def test_malformed_request_is_refused_and_has_its_id_alone(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    fields: list[dict[str, str]] = []

    def note(_: logging.LogRecord) -> bool:
        fields.append(dict(logs.context.get() or {}))
        return True

    logger = logging.getLogger("crust.rpc.serving.service")
    caplog.set_level(logging.DEBUG, logger.name)
    logger.addFilter(note)
    try:
        refusal = refused(port.answer(Call(STATS, (), 20), b"\xff"), Code.INVALID_ARGUMENT)
        assert "[MalformedMessage]" in await refusal
    finally:
        logger.removeFilter(note)
    assert [list(logged) for logged in fields] == [["request_id"]]


async def test_deadline_ends_the_method(port: Port, node: Node) -> None:
    async with asyncio.timeout(60):
        while not node.entered.is_set():  # a busy machine may take longer until the call is there
            await refused(stats(port, "hang", timeout=0.3), Code.DEADLINE_EXCEEDED)
        await node.ended.wait()


async def test_caller_that_goes_away_ends_the_method(port: Port, node: Node) -> None:
    call = asyncio.create_task(stats(port, "hang"))
    async with asyncio.timeout(60):
        await node.entered.wait()
        call.cancel()
        await node.ended.wait()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_stream_of_answers_is_whole(port: Port) -> None:
    numbers = [answer.volume_capacity_bytes async for answer in allocated(port, count=50)]
    assert numbers == list(range(50))


async def test_error_in_a_stream_comes_after_the_answers_before_it(port: Port) -> None:
    numbers: list[int] = []

    async def collect() -> None:
        async for answer in allocated(port, "error"):
            numbers.append(answer.volume_capacity_bytes)

    await refused(collect(), Code.DATA_LOSS, "[Corrupt] broken in the middle")
    assert numbers == [0, 1, 2]


async def test_stream_that_is_left_ends_its_method(port: Port, node: Node) -> None:
    answers = allocated(port, "hang")
    async with asyncio.timeout(60):
        async for answer in answers:
            if answer.volume_capacity_bytes == 2:
                break  # the last one that comes
        await answers.aclose()
        await node.ended.wait()


async def test_pass_through_calls_reach_it(port: Port, node: Node) -> None:
    outer = local_port(Service("outer", others=port))
    assert (await stats(outer)).usage[0].total == 7
    await refused(stats(outer, "error"), Code.NOT_FOUND, "[NotFound] no such volume")
    with pytest.raises(PeerStatus) as caught:
        await stats(outer, "abort")
    assert caught.value.code is Code.ABORTED
    assert dict(caught.value.trailing)["peer"] == "said"
    call = Call(STATS, (("asked", "yes"),), 20)
    await outer.answer(call, b"")
    assert (dict(call.initial), dict(call.trailing)) == ({"first": "1"}, {"last": "2"})
    assert node.metadata["asked"] == "yes"
    numbers = [answer.volume_capacity_bytes async for answer in allocated(outer)]
    assert numbers == list(range(5))
    await refused(outer.answer(Call("/csi.v1.Node/Nothing", (), 20), b""), Code.UNIMPLEMENTED)


async def test_later_connection_has_another_number(short: str, node: Node) -> None:
    """What a driver said of itself holds for one connection: another one may lead to another version."""
    path = f"{short}/s.sock"
    async with SocketPort(path) as to:
        assert to.connection == 0
        async with server.serving(path, service_of(node)):
            await stats(to)
            first = to.connection
            assert first
            assert to.connection == first
        async with server.serving(path, service_of(node)):
            await repeated(lambda: stats(to), Code.UNAVAILABLE)
            assert to.connection not in (0, first)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as running:
        yield running


async def code_at(port: Port) -> grpc.StatusCode:
    with pytest.raises(PeerStatus) as caught:
        await stats(port, "error")
    return caught.value.code


async def test_inner_path_is_served_by_its_part_alone(short: str, stack: AsyncExitStack) -> None:
    path = f"{short}/driver.sock"
    ports = Ports(inner=[path])
    to = await stack.enter_async_context(ports.connect(path))
    assert await code_at(to) is grpc.StatusCode.UNAVAILABLE
    async with ports.serving(path, service_of(Node())):
        assert await code_at(to) is grpc.StatusCode.NOT_FOUND
        assert not Path(path).exists()
    assert await code_at(to) is grpc.StatusCode.UNAVAILABLE


async def test_shared_path_is_served_on_its_socket_too(short: str, stack: AsyncExitStack) -> None:
    path = f"{short}/runtime.sock"
    ports = Ports(shared=[path])
    inside = await stack.enter_async_context(ports.connect(path))
    outside = await stack.enter_async_context(SocketPort(path))
    async with ports.serving(path, service_of(Node())):
        assert await code_at(inside) is grpc.StatusCode.NOT_FOUND
        assert await code_at(outside) is grpc.StatusCode.NOT_FOUND


async def test_any_other_path_is_a_socket(short: str, stack: AsyncExitStack) -> None:
    path = f"{short}/other.sock"
    ports = Ports(inner=[f"{short}/driver.sock"])
    to = await stack.enter_async_context(ports.connect(path))
    async with ports.serving(path, service_of(Node())):
        assert Path(path).is_socket()
        assert await code_at(to) is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
async def test_call_through_three_parts_has_one_line_and_one_id(
    short: str, stack: AsyncExitStack, caplog: pytest.LogCaptureFixture, level: int
) -> None:
    caplog.set_level(level, "crust.rpc.serving.service")
    ids: list[str] = []

    def note(_: logging.LogRecord) -> bool:
        ids.append(request_id())
        return True

    logger = logging.getLogger("crust.rpc.serving.service")
    logger.addFilter(note)
    stack.callback(logger.removeFilter, note)

    class Recording(Node):
        async def NodeExpandVolume(self, request: Any, call: Any) -> Any:
            ids.append(request_id())
            return csi_pb2.NodeExpandVolumeResponse()

    shim, driver, front = (f"{short}/{name}.sock" for name in ("shim", "driver", "csi"))
    ports = Ports(inner=[shim, driver])
    enter = stack.enter_async_context
    await enter(ports.serving(driver, service_of(Recording())))
    for path, behind in ((shim, driver), (front, shim)):
        others = await enter(ports.connect(behind))
        await enter(ports.serving(path, Service(path, others=others)))
    to = await enter(channel.connect(front))
    await csi_pb2_grpc.NodeStub(to).NodeExpandVolume(csi_pb2.NodeExpandVolumeRequest())
    served = [record for record in caplog.records if record.message == "served"]
    assert [record.levelno for record in served].count(logging.INFO) == 1
    assert len(served) == (1 if level == logging.INFO else 3)
    assert len(ids) == len(served) + 1
    assert len(set(ids)) == 1
    assert ids[0]


def request_id() -> str:
    return (logs.context.get() or {}).get("request_id", "")
