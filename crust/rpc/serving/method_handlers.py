"""Handlers of gRPC methods (`grpc.RpcMethodHandler`): called by crust itself, with bytes for bytes, or wrapped."""

from collections.abc import Callable
from typing import Any

Handler = Any
"""grpc.RpcMethodHandler, which is generic in its stubs only."""


def decoded(handler: Handler, data: bytes) -> Any:
    """The request as the handler takes it. Raises `crust.rpc.messages.requests.DecodeError`."""
    decode = handler.request_deserializer
    return data if decode is None else decode(data)


def encoded(handler: Handler, answer: Any) -> bytes:
    """The bytes of an answer."""
    encode = handler.response_serializer
    data: bytes = answer if encode is None else encode(answer)
    return data


METHODS_MAX = 256
"""More than all services of CSI and crust have."""


class WrappedHandlers:
    """The handlers of an interceptor's methods, each wrapped once: that takes a part of a small call's time.

    `wrap` gets the method and its handler. The caller of a method that passes through chooses its name, so the number
    that is kept has a limit.
    """

    def __init__(self, wrap: Callable[[str, Handler], Handler]) -> None:
        self._wrap = wrap
        self._known: dict[str, tuple[Handler, Handler]] = {}

    def of(self, method: str, handler: Handler | None) -> Handler | None:
        """The wrapped handler; None for a method that has none, which stays unknown."""
        if handler is None:
            return None
        known = self._known.get(method)
        if known is not None and known[0] is handler:
            return known[1]
        wrapped = self._wrap(method, handler)
        if len(self._known) < METHODS_MAX:
            self._known[method] = handler, wrapped
        return wrapped
