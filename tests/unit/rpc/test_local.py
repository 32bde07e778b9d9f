"""gRPC within a process behaves as gRPC over a socket: each test runs against both."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from crust import errors, logs
from crust.rpc import channel, passthrough
from crust.rpc.in_process.local import LocalServer
from crust.rpc.messages.call_fields import CallFields
from crust.rpc.serving import server
from crust.rpc.serving.health import Health
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support.faults.refusals import refused

Code = grpc.StatusCode


class Node(csi_pb2_grpc.NodeServicer, csi_pb2_grpc.SnapshotMetadataServicer):
    """What each call does is its volume id."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}
        self.fields: dict[str, str] = {}
        self.remaining_s: float | None = None
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def NodeGetVolumeStats(self, request: Any, context: Any) -> Any:
        self.metadata = dict(context.invocation_metadata())
        if request.volume_id in ("first", "second"):
            self.fields = dict(logs.context.get() or {})
        self.remaining_s = context.time_remaining()
        if request.volume_id == "error":
            raise errors.NotFound("no such volume", hint="look for it")
        if request.volume_id == "abort":
            await context.abort(Code.ABORTED, "later", (("peer", "said"),))
        if request.volume_id == "bug":
            raise ZeroDivisionError
        if request.volume_id == "hang":
            self.entered.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        await context.send_initial_metadata((("first", "1"),))
        context.set_trailing_metadata((("last", "2"),))
        usage = csi_pb2.VolumeUsage(unit=csi_pb2.VolumeUsage.BYTES, total=7)
        return csi_pb2.NodeGetVolumeStatsResponse(usage=[usage])

    async def GetMetadataAllocated(self, request: Any, context: Any) -> AsyncIterator[Any]:
        for number in range(request.max_results):
            yield csi_pb2.GetMetadataAllocatedResponse(volume_capacity_bytes=number)
            if number == 2 and request.snapshot_id == "error":
                raise errors.Corrupt("broken in the middle")
            if number == 2 and request.snapshot_id == "hang":
                self.entered.set()
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    self.cancelled.set()
                    raise


@pytest.fixture
def node() -> Node:
    return Node()  # type: ignore[abstract]


def add(node: Node, to: Any) -> None:
    csi_pb2_grpc.add_NodeServicer_to_server(node, to)
    csi_pb2_grpc.add_SnapshotMetadataServicer_to_server(node, to)


@pytest_asyncio.fixture(params=["local", "socket"])
async def connected(request: pytest.FixtureRequest, node: Node) -> AsyncIterator[grpc.aio.Channel]:
    if request.param == "local":
        local = LocalServer()
        local.open("test", Health())
        add(node, local)
        async with local.channel() as to:
            yield to
        return
    with tempfile.TemporaryDirectory(prefix="crust-") as root:
        served = server.serving(f"{root}/s.sock", lambda to: add(node, to), name="test")
        async with served, channel.connect(f"{root}/s.sock") as to:
            yield to


def stats(to: grpc.aio.Channel, volume_id: str = "", **options: Any) -> Any:
    request = csi_pb2.NodeGetVolumeStatsRequest(volume_id=volume_id)
    return csi_pb2_grpc.NodeStub(to).NodeGetVolumeStats(request, **{"timeout": 20, **options})


def allocated(to: grpc.aio.Channel, snapshot_id: str = "", count: int = 5) -> Any:
    request = csi_pb2.GetMetadataAllocatedRequest(snapshot_id=snapshot_id, max_results=count)
    return csi_pb2_grpc.SnapshotMetadataStub(to).GetMetadataAllocated(request, timeout=20)


async def test_answer_metadata_and_deadline_travel_both_ways(
    connected: grpc.aio.Channel, node: Node
) -> None:
    call = stats(connected, metadata=(("asked", "yes"),), timeout=9)
    assert dict(await call.initial_metadata()) == {"first": "1"}
    assert (await call).usage[0].total == 7
    assert dict(await call.trailing_metadata()) == {"last": "2"}
    assert node.metadata["asked"] == "yes"
    assert node.remaining_s is not None
    # gRPC counts from a clock that it reads once per turn: a little more than 9 is right
    assert 0 < node.remaining_s < 10


async def test_calls_of_one_task_have_fields_of_their_own(
    connected: grpc.aio.Channel, node: Node
) -> None:
    """Work in the background serves no call: its second call must not be logged as its first one."""
    for volume_id in ("first", "second"):
        await stats(connected, volume_id)
        assert node.fields["volume_id"] == volume_id
        assert logs.context.get() is None


async def test_call_within_a_served_call_does_not_read_the_request_of_that(node: Node) -> None:
    """It is read when a line is written, or after the answer."""
    asked: list[str] = []

    def name() -> str:
        asked.append("name")
        return "driver"

    local = LocalServer()
    local.open("test", Health())
    add(node, local)
    fields = CallFields("/x", b"", name)
    logs.context.set(fields)
    async with local.channel() as to:
        await stats(to)
    assert logs.context.get() is fields
    assert asked == []


async def test_errors_become_statuses(connected: grpc.aio.Channel) -> None:
    await refused(
        stats(connected, "error"), Code.NOT_FOUND, "[NotFound] no such volume", "look for it"
    )
    await refused(stats(connected, "bug"), Code.INTERNAL, "UnexpectedError")


async def test_an_aborted_call_has_code_details_and_metadata(connected: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stats(connected, "abort")
    assert caught.value.code() is Code.ABORTED
    assert caught.value.details() == "later"
    assert dict(caught.value.trailing_metadata())["peer"] == "said"


async def test_unknown_method_is_unimplemented(connected: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _raw(connected, "/csi.v1.Node/Nothing")
    assert caught.value.code() is Code.UNIMPLEMENTED


async def test_deadline_ends_the_handler(connected: grpc.aio.Channel, node: Node) -> None:
    async with asyncio.timeout(60):
        while not node.entered.is_set():  # a busy machine may take longer until the call is there
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stats(connected, "hang", timeout=0.3)
            assert caught.value.code() is Code.DEADLINE_EXCEEDED
        await node.cancelled.wait()


async def test_caller_that_goes_away_ends_the_handler(
    connected: grpc.aio.Channel, node: Node
) -> None:
    call = asyncio.ensure_future(_awaited(stats(connected, "hang")))
    async with asyncio.timeout(60):
        await node.entered.wait()
        call.cancel()
        await node.cancelled.wait()
    with pytest.raises(asyncio.CancelledError):
        await call


async def _raw(to: grpc.aio.Channel, method: str) -> Any:
    call: Any = to.unary_unary(method)
    return await call(b"", timeout=20)


async def _awaited(call: Any) -> Any:
    return await call


async def test_stream_of_answers_is_whole(connected: grpc.aio.Channel) -> None:
    found = [each.volume_capacity_bytes async for each in allocated(connected, count=50)]
    assert found == list(range(50))


async def test_error_in_a_stream_comes_after_the_answers_before_it(
    connected: grpc.aio.Channel,
) -> None:
    found: list[int] = []

    async def collect() -> None:
        async for each in allocated(connected, "error"):
            found.append(each.volume_capacity_bytes)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect()
    assert found == [0, 1, 2]
    assert caught.value.code() is Code.DATA_LOSS


async def test_stream_that_is_left_ends_its_handler(
    connected: grpc.aio.Channel, node: Node
) -> None:
    call = allocated(connected, "hang")
    async with asyncio.timeout(60):
        async for each in call:
            if each.volume_capacity_bytes == 2:
                break  # the last one that comes
        await node.entered.wait()
        call.cancel()
        await node.cancelled.wait()


async def test_pass_through_calls_reach_it(connected: grpc.aio.Channel, node: Node) -> None:
    local = LocalServer()
    local.open("outer", Health(), [passthrough.Passthrough(connected)])
    async with local.channel() as outer:
        assert (await stats(outer)).usage[0].total == 7
        await refused(stats(outer, "error"), Code.NOT_FOUND, "[NotFound] no such volume")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stats(outer, "abort")
        assert caught.value.code() is Code.ABORTED
        assert dict(caught.value.trailing_metadata())["peer"] == "said"
        call = stats(outer, metadata=(("asked", "yes"),))
        assert dict(await call.initial_metadata()) == {"first": "1"}
        assert dict(await call.trailing_metadata()) == {"last": "2"}
        assert node.metadata["asked"] == "yes"
        found = [each.volume_capacity_bytes async for each in allocated(outer)]
        assert found == list(range(5))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _raw(outer, "/csi.v1.Node/Nothing")
        assert caught.value.code() is Code.UNIMPLEMENTED


async def test_pass_through_call_that_goes_away_ends_the_handler(
    connected: grpc.aio.Channel, node: Node
) -> None:
    local = LocalServer()
    local.open("outer", Health(), [passthrough.Passthrough(connected)])
    async with local.channel() as outer, asyncio.timeout(60):
        call = asyncio.ensure_future(_awaited(stats(outer, "hang")))
        await node.entered.wait()
        call.cancel()
        await node.cancelled.wait()
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_a_local_channel_is_connected_until_it_is_closed() -> None:
    channel_ = LocalServer().channel()
    assert channel_.get_state() is grpc.ChannelConnectivity.READY
    waiting = asyncio.create_task(channel_.wait_for_state_change(grpc.ChannelConnectivity.READY))
    await channel_.close()
    await waiting
    assert channel_.get_state() is grpc.ChannelConnectivity.SHUTDOWN
