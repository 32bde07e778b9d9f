"""What the proxy logs of a call, and the name of its error."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from crust.core import errors, logs
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support.faults.refusals import refused
from tests.support.nodes import node as nodes
from tests.support.nodes.node import Node
from tests.support.reported import reported
from tests.support.runtimes.fake_handler import FakeHandler, sandbox

Lines = list[dict[str, Any]]


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    written = io.StringIO()
    logs.configure(fmt="json", stream=written)
    yield written
    root.handlers[:] = handlers
    root.setLevel(level)


async def served(stream: io.StringIO, rpc: str) -> Lines:
    await reported()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [line for line in lines if line["message"] == "served" and line["rpc"] == rpc]


async def test_publish_has_one_request_id_in_proxy_shim_and_driver(
    kata: Node, stream: io.StringIO
) -> None:
    target = kata.places.target("one")
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
    kata: Node, stream: io.StringIO
) -> None:
    target = kata.places.target("one")
    await kata.co.publish("vol-1", target)
    with kata.sandbox(target):
        await kata.co.stats("vol-1", target)
    (asked,) = {line["request_id"] for line in await served(stream, "NodeGetVolumeStats")}
    (runtime,) = await served(stream, "RuntimeGetVolumeStats")
    (handler,) = await served(stream, "GetVolumeStats")
    for line in (runtime, handler):
        assert (line["request_id"], line["volume_id"], line["target"], line["driver"]) == (
            asked,
            "vol-1",
            target,
            kata.driver.name,
        )


async def test_refusal_is_a_warning_and_names_its_volume(node: Node, stream: io.StringIO) -> None:
    target = node.places.target("one")
    await refused(node.co.publish("vol-1", target), grpc.StatusCode.FAILED_PRECONDITION, "handler")
    (line,) = await served(stream, "NodePublishVolume")
    assert line["level"] == "warning"
    assert (line["volume_id"], line["target"]) == ("vol-1", target)


async def test_driver_that_is_away_is_named_with_what_to_do(
    places: nodes.Places, stream: io.StringIO
) -> None:
    async with nodes.shim(places), channel.connect(places.shim) as to_shim:
        request = csi_pb2.NodeUnpublishVolumeRequest(volume_id="vol-1", target_path="/t")
        await refused(
            csi_pb2_grpc.NodeStub(to_shim).NodeUnpublishVolume(request, timeout=20),
            grpc.StatusCode.UNAVAILABLE,
            f"[PeerNotReachable] the process that serves {places.driver} cannot be reached",
            "there is no such socket; start it",
        )
    (line,) = await served(stream, "NodeUnpublishVolume")
    assert (line["level"], line["volume_id"], line["target"]) == ("warning", "vol-1", "/t")
    assert "failed to connect" not in line["error"]


class GuestLost(errors.PeerUnavailable):
    """An error of a runtime that crust does not know."""


async def test_error_of_handler_keeps_its_name_through_proxy_and_shim(node: Node) -> None:
    target = node.places.target("one")
    fake = FakeHandler()
    async with node.handler(fake=fake):
        await node.co.publish("vol-1", target)
        fake.error = GuestLost("the guest does not answer", hint="look at its console")
        with sandbox(node.places.volumes, target), pytest.raises(grpc.aio.AioRpcError) as caught:
            await node.co.stats("vol-1", target)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "[GuestLost] the guest does not answer; look at its console"
    assert not [key for key, _ in caught.value.trailing_metadata() if "details" in key]
