"""A handler's error on its way handler, proxy, shim, proxy, CO: the CO sees the name that it had first."""

import grpc
import pytest

from crust import errors
from tests.support.nodes.node import Node
from tests.support.runtimes.fake_handler import FakeHandler, sandbox


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
