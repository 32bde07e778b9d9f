"""What the proxy and the shim log of a call, and the name of its error."""

import io
import json
import logging
from typing import Any

import grpc
import pytest

from crust.core import errors, logs
from crust.rpc import channel
from tests.support.co import Co
from tests.support.faults.refusals import refused
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places


async def test_log_line_of_publish_on_host_says_what_decided(
    node: FakeNode, target: str, caplog: pytest.LogCaptureFixture
) -> None:
    lines: list[dict[str, Any]] = []

    def note(record: logging.LogRecord) -> bool:  # now: the fields of a call end with it
        lines.append(logs.extra_of(record))
        return True

    caplog.handler.addFilter(note)
    with caplog.at_level(logging.INFO):
        context = {"crust.dev/defer": "never"}
        await node.co.publish("vol-1", target, defer=False, volume_context=context)
    (decider,) = {line["decided_by"] for line in lines if "decided_by" in line}
    assert decider == "the volume context, crust.dev/defer=never"


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
        assert await served(stream, "NodeGetVolumeStats") == []  # a kubelet polls it
        logging.getLogger().setLevel(logging.DEBUG)
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


async def test_statistics_refused_before_the_guest_mounts_are_logged_at_debug(
    kata: FakeNode, published: str, stream: io.StringIO
) -> None:
    """A kubelet polls them. Each refusal was a warning, while the guest booted."""
    for level, logged in ((logging.INFO, set()), (logging.DEBUG, {"debug"})):
        logging.getLogger().setLevel(level)
        with pytest.raises(grpc.aio.AioRpcError, match="NotMountedInSandbox"):
            await kata.co.stats("vol-1", published)
        lines = await served(stream, "NodeGetVolumeStats")
        assert {line["level"] for line in lines} == logged


async def test_statistics_that_a_handler_fails_are_warned_of(
    node: FakeNode, target: str, stream: io.StringIO
) -> None:
    async with node.deferred(target) as fake:
        fake.error = GuestLost("the guest does not answer")
        with node.sandbox(target), pytest.raises(grpc.aio.AioRpcError):
            await node.co.stats("vol-1", target)
    lines = await served(stream, "NodeGetVolumeStats")
    assert {line["level"] for line in lines} == {"warning"}


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
