"""The connection to a driver: one socket, or one of its controller part and one of its node part.

CSI lets a driver be two plugins, each with Identity. A call goes to the part that serves it; Identity is asked of the
controller part, whose capabilities tell a CO what the driver can do.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import grpc

from crust.rpc import channel

_OF_NODE = "/csi.v1.Node/"


@contextmanager
def opened(node: str, controller: str = "") -> Iterator[grpc.Channel]:
    """A channel to the socket `node`, and for all but the node's service to `controller` if there is one."""
    with ExitStack() as stack:
        own = stack.enter_context(closing(_connected(node)))
        if not controller:
            yield own
            return
        yield _Split(own, stack.enter_context(closing(_connected(controller))))


def _connected(socket: str) -> grpc.Channel:
    settings = [*channel.OPTIONS, ("grpc.default_authority", "localhost")]
    return grpc.insecure_channel(channel.target_of(socket), options=settings)


class _Split(grpc.Channel):
    """Two channels as one."""

    def __init__(self, node: grpc.Channel, controller: grpc.Channel) -> None:
        self._node = node
        self._controller = controller

    def unary_unary(self, method: str, *given: Any, **named: Any) -> Any:
        return self._of(method).unary_unary(method, *given, **named)

    def unary_stream(self, method: str, *given: Any, **named: Any) -> Any:
        return self._of(method).unary_stream(method, *given, **named)

    def stream_unary(self, method: str, *given: Any, **named: Any) -> Any:
        return self._of(method).stream_unary(method, *given, **named)

    def stream_stream(self, method: str, *given: Any, **named: Any) -> Any:
        return self._of(method).stream_stream(method, *given, **named)

    def subscribe(
        self,
        callback: Callable[[grpc.ChannelConnectivity], None],
        try_to_connect: bool | None = False,  # noqa: FBT001, FBT002 - as gRPC has it
    ) -> None:
        self._node.subscribe(callback, bool(try_to_connect))

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        self._node.unsubscribe(callback)

    def close(self) -> None:
        """They are closed by who opened them."""

    def __enter__(self) -> "_Split":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _of(self, method: str) -> grpc.Channel:
        return self._node if method.startswith(_OF_NODE) else self._controller
