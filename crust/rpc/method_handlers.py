"""The handler of one gRPC method (`grpc.RpcMethodHandler`), when crust calls it itself: with bytes, for bytes."""

from typing import Any

Handler = Any
"""grpc.RpcMethodHandler, which is generic in its stubs only."""


def decoded(handler: Handler, data: bytes) -> Any:
    """The request as the handler takes it. Raises `crust.rpc.requests.DecodeError`."""
    decode = handler.request_deserializer
    return data if decode is None else decode(data)


def encoded(handler: Handler, answer: Any) -> bytes:
    """The bytes of an answer."""
    encode = handler.response_serializer
    data: bytes = answer if encode is None else encode(answer)
    return data
