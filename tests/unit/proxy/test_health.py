"""Problems of the proxy itself are shown to operators, and fail a Probe through any driver's socket."""

import asyncio
import os

import grpc
import pytest

from crust.cli.inspecting import show
from crust.rpc.serving import server
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from crust.wire.v1 import inspect_pb2
from tests.support.faults.refusals import refused
from tests.support.nodes import node as nodes
from tests.support.nodes.node import Node


async def _condition(node: Node) -> inspect_pb2.GetHealthResponse.Condition:
    async with asyncio.timeout(60):
        while True:
            answer = await node.inspect.GetHealth(inspect_pb2.GetHealthRequest())
            if answer.conditions:
                return answer.conditions[0]
            await asyncio.sleep(0.01)


async def test_a_socket_that_was_removed_is_shown_and_fails_the_probe(
    places: nodes.Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CHECK_S", 0.01)
    async with nodes.running(places) as node:
        identity: csi_pb2_grpc.IdentityAsyncStub = csi_pb2_grpc.IdentityStub(node.co.channel)
        await identity.Probe(csi_pb2.ProbeRequest(), timeout=10)
        assert (await show.answer(places.run, show.status)).names == ("handlers",)
        os.unlink(places.sockets.runtime)
        found = await _condition(node)
        assert found.part == f"socket {places.sockets.runtime}"
        assert found.error_name == "SocketLost"
        shown = await show.answer(places.run, show.status)
        assert f"socket {places.sockets.runtime}" in shown.names
        assert "SocketLost" in shown.rendered("table").plain
        await refused(
            identity.Probe(csi_pb2.ProbeRequest(), timeout=10),
            grpc.StatusCode.FAILED_PRECONDITION,
            places.sockets.runtime,
            "restart this process",
        )
