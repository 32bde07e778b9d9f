"""What the bytes of a request, and the name of its method, say."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message

from crust.core import errors
from crust.wire.csi.v1 import csi_pb2
from crust.wire.v1 import handlers_pb2, inspect_pb2, pool_pb2, runtime_pb2

Request = TypeVar("Request", bound=Message)


def parse(kind: type[Request], data: bytes) -> Request:
    """Parse a message; unknown fields are kept. Raises `MalformedMessage`."""
    try:
        return kind.FromString(data)
    except DecodeError as err:
        raise errors.InvalidRequest.named(
            "MalformedMessage",
            f"the request cannot be parsed as {kind.DESCRIPTOR.full_name}",
            why="its bytes are not a valid protobuf message",
            hint="check the caller's CSI version, and any proxy between it and crust",
        ) from err


def needs_state(method: str) -> bool:
    """Whether a method of CSI reads or writes the state: all but identity, health and capabilities do."""
    return not (method.startswith("/csi.v1.Identity/") or method.endswith("Capabilities"))


def identity(request: Message) -> bytes:
    """The identity of a request: its fields without the secrets, which may be renewed."""
    plain = request
    if getattr(request, "secrets", None):
        plain = type(request)()
        plain.CopyFrom(request)
        plain.ClearField("secrets")
    return plain.SerializeToString(deterministic=True)


def decoded(method: str, request: bytes) -> Message | None:
    """The request of a call; None if it is not one of CSI or crust."""
    kind = _kinds().get(method)
    if kind is None:
        return None
    try:
        message: Message = kind.FromString(request)
    except DecodeError:
        return None
    return message


def kind_of(method: str) -> Any:
    """The class of the requests of a method that is known."""
    return _kinds()[method]


def is_known(method: str) -> bool:
    """Whether a method is one of CSI, or of crust."""
    return method in _kinds()


def is_unary(method: str) -> bool:
    """Whether a method is one of CSI, or of crust, that has one request and one answer."""
    return method in _unary_methods()


def _methods() -> Iterator[tuple[str, MethodDescriptor]]:
    """Each method by its full name (`/csi.v1.Node/NodeStageVolume`)."""
    for file in (csi_pb2, runtime_pb2, handlers_pb2, inspect_pb2, pool_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield f"/{service.full_name}/{method.name}", method


@cache
def _kinds() -> Mapping[str, Any]:
    """The request of each method."""
    return {name: message_factory.GetMessageClass(each.input_type) for name, each in _methods()}


@cache
def _unary_methods() -> frozenset[str]:
    return frozenset(
        name for name, each in _methods() if not (each.client_streaming or each.server_streaming)
    )
