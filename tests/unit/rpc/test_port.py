"""The contract of a port: its two ends, a socket and a part of the process, behave the same."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from crust import errors, logs
from crust.rpc import passthrough
from crust.rpc.in_process.local import LocalPort, LocalServer
from crust.rpc.messages.call_fields import CallFields
from crust.rpc.port import Heard, Port, SocketPort, stub
from crust.rpc.serving import server
from crust.rpc.serving.health import Health
from crust.rpc.status import PeerStatus
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support.faults.refusals import refused

Code = grpc.StatusCode
STATS = "/csi.v1.Node/NodeGetVolumeStats"


class Node(csi_pb2_grpc.NodeServicer, csi_pb2_grpc.SnapshotMetadataServicer):
    """What each call does is its volume id."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}
        self.fields: dict[str, str] = {}
        self.remaining_s: float | None = None
        self.entered = asyncio.Event()
        self.ended = asyncio.Event()

    async def NodeGetVolumeStats(self, request: Any, context: Any) -> Any:
        self.metadata = dict(context.invocation_metadata())
        if request.volume_id in ("first", "second"):
            self.fields = dict(logs.context.get() or {})
        self.remaining_s = context.time_remaining()
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
        await context.send_initial_metadata((("first", "1"),))
        context.set_trailing_metadata((("last", "2"),))
        usage = csi_pb2.VolumeUsage(unit=csi_pb2.VolumeUsage.BYTES, total=7)
        return csi_pb2.NodeGetVolumeStatsResponse(usage=[usage])

    async def GetMetadataAllocated(self, request: Any, context: Any) -> AsyncIterator[Any]:
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


@pytest.fixture
def node() -> Node:
    return Node()  # type: ignore[abstract]


def add(node: Node, to: Any) -> None:
    csi_pb2_grpc.add_NodeServicer_to_server(node, to)
    csi_pb2_grpc.add_SnapshotMetadataServicer_to_server(node, to)


def local_port(node: Node) -> LocalPort:
    local = LocalServer()
    local.open("test", Health())
    add(node, local)
    return LocalPort(local)


@pytest_asyncio.fixture(params=["local", "socket"])
async def port(request: pytest.FixtureRequest, node: Node) -> AsyncIterator[Port]:
    if request.param == "local":
        yield local_port(node)
        return
    with tempfile.TemporaryDirectory(prefix="crust-") as root:
        served = server.serving(f"{root}/s.sock", lambda to: add(node, to), name="test")
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
    heard = Heard()
    data = await port.call(STATS, b"", (("asked", "yes"),), 9, heard)
    assert csi_pb2.NodeGetVolumeStatsResponse.FromString(data).usage[0].total == 7
    assert (dict(heard.initial), dict(heard.trailing)) == ({"first": "1"}, {"last": "2"})
    assert node.metadata["asked"] == "yes"
    assert node.remaining_s is not None
    # gRPC counts from a clock that it reads once per turn: a little more than 9 is right
    assert 0 < node.remaining_s < 10


async def test_calls_of_one_task_have_fields_of_their_own(port: Port, node: Node) -> None:
    """Work in the background serves no call: its second call must not be logged as its first one."""
    for volume_id in ("first", "second"):
        await stats(port, volume_id)
        assert node.fields["volume_id"] == volume_id
        assert logs.context.get() is None


async def test_stream_has_its_fields_and_its_reader_keeps_those_it_has(
    port: Port, node: Node
) -> None:
    async for _ in allocated(port, "snap"):
        assert logs.context.get() is None
        assert node.fields["snapshot_id"] == "snap"
    assert logs.context.get() is None


async def test_call_within_a_served_call_does_not_read_the_request_of_that(node: Node) -> None:
    """It is read when a line is written, or after the answer."""
    asked: list[str] = []

    def name() -> str:
        asked.append("name")
        return "driver"

    fields = CallFields("/x", b"", name)
    logs.context.set(fields)
    await stats(local_port(node))
    assert logs.context.get() is fields
    assert asked == []


async def test_errors_become_statuses(port: Port) -> None:
    await refused(stats(port, "error"), Code.NOT_FOUND, "[NotFound] no such volume", "look for it")
    await refused(stats(port, "bug"), Code.INTERNAL, "UnexpectedError")


async def test_status_of_a_peer_has_code_text_and_metadata(port: Port) -> None:
    with pytest.raises(PeerStatus) as caught:
        await stats(port, "abort")
    assert (caught.value.code, caught.value.text) == (Code.ABORTED, "later")
    assert dict(caught.value.trailing)["peer"] == "said"


async def test_unknown_method_is_unimplemented(port: Port) -> None:
    await refused(port.call("/csi.v1.Node/Nothing", b"", timeout_s=20), Code.UNIMPLEMENTED)


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
    found = [each.volume_capacity_bytes async for each in allocated(port, count=50)]
    assert found == list(range(50))


async def test_error_in_a_stream_comes_after_the_answers_before_it(port: Port) -> None:
    found: list[int] = []

    async def collect() -> None:
        async for each in allocated(port, "error"):
            found.append(each.volume_capacity_bytes)

    await refused(collect(), Code.DATA_LOSS, "[Corrupt] broken in the middle")
    assert found == [0, 1, 2]


async def test_stream_that_is_left_ends_its_method(port: Port, node: Node) -> None:
    answers = allocated(port, "hang")
    async with asyncio.timeout(60):
        async for each in answers:
            if each.volume_capacity_bytes == 2:
                break  # the last one that comes
        await answers.aclose()
        await node.ended.wait()


async def test_pass_through_calls_reach_it(port: Port, node: Node) -> None:
    local = LocalServer()
    local.open("outer", Health(), [passthrough.Passthrough(port)])
    outer = LocalPort(local)
    assert (await stats(outer)).usage[0].total == 7
    await refused(stats(outer, "error"), Code.NOT_FOUND, "[NotFound] no such volume")
    with pytest.raises(PeerStatus) as caught:
        await stats(outer, "abort")
    assert caught.value.code is Code.ABORTED
    assert dict(caught.value.trailing)["peer"] == "said"
    heard = Heard()
    await outer.call(STATS, b"", (("asked", "yes"),), 20, heard)
    assert (dict(heard.initial), dict(heard.trailing)) == ({"first": "1"}, {"last": "2"})
    assert node.metadata["asked"] == "yes"
    found = [each.volume_capacity_bytes async for each in allocated(outer)]
    assert found == list(range(5))
    await refused(outer.call("/csi.v1.Node/Nothing", b"", timeout_s=20), Code.UNIMPLEMENTED)


async def test_pass_through_call_that_goes_away_ends_the_method(port: Port, node: Node) -> None:
    local = LocalServer()
    local.open("outer", Health(), [passthrough.Passthrough(port)])
    async with asyncio.timeout(60):
        call = asyncio.create_task(stats(LocalPort(local), "hang"))
        await node.entered.wait()
        call.cancel()
        await node.ended.wait()
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_a_later_connection_has_another_number(short: str, node: Node) -> None:
    """What a driver said of itself holds for one connection: another one may lead to another version."""
    path = f"{short}/s.sock"
    async with SocketPort(path) as to:
        assert to.connection == 0
        async with server.serving(path, lambda to: add(node, to), name="test"):
            await stats(to)
            first = to.connection
            assert first
            assert to.connection == first
        async with asyncio.timeout(60), server.serving(path, lambda to: add(node, to), name="test"):
            while not await _answered(to):
                pass
            assert to.connection not in (0, first)


async def _answered(to: Port) -> bool:
    try:
        await stats(to)
    except PeerStatus:
        return False
    return True
