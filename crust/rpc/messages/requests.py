"""What the bytes of a request, and the name of its method, say; size limits and required fields of CSI's requests.

A string has at most 128 bytes and a map at most 4 KiB, keys and values together, unless its field says otherwise
(CSI "Size Limits"). A kubelet puts pod data and service account tokens into contexts and secrets under keys of its
own, and these alone may be longer, so they are not counted. Errors name the field and its length, never its content.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message

from crust.core import errors, volumes
from crust.wire.csi.v1 import csi_pb2
from crust.wire.v1 import handlers_pb2, inspect_pb2, pool_pb2, runtime_pb2

Request = TypeVar("Request", bound=Message)

MAP_MAX_BYTES = 4096
RECORDED_ID_MAX_BYTES = 512
"""What a record of the handoff directory holds. Public drivers have ids of 250 bytes, and no CO refuses them."""

_KUBERNETES_PREFIX = "csi.storage.k8s.io/"
_CONTROL = re.compile("[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f]")


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


class MissingField(errors.InvalidRequest):
    """A REQUIRED field is not set."""

    def __init__(self, field: str) -> None:
        super().__init__(f"{field} is missing", why="CSI requires it", hint=f"set {field}")
        self.field = field


class StagingPathNotGiven(errors.NotReady):
    """CSI NodePublishVolume: FAILED_PRECONDITION where STAGE_UNSTAGE_VOLUME is advertised."""

    def __init__(self) -> None:
        super().__init__(
            "staging_target_path is missing",
            why="this driver stages volumes",
            hint="call NodeStageVolume and send its path",
        )


class FieldTooLong(errors.InvalidRequest):
    """A field is longer than CSI allows."""

    def __init__(self, field: str, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"{field} is too long",
            why=f"it has {size_bytes} bytes, CSI allows {limit_bytes}",
        )
        self.field = field
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class InvalidStartingToken(errors.OperationPending):
    """An invalid starting_token (CSI ListVolumes: ABORTED, and the CO starts over)."""

    def __init__(self, token: str) -> None:
        super().__init__(
            f"the starting_token {token[:64]!r} is invalid",
            why="this driver did not issue it",
            hint="start from the beginning, without a token",
        )


class NegativeMaxEntries(errors.InvalidRequest):
    """max_entries below zero."""

    def __init__(self, count: int) -> None:
        super().__init__("max_entries is invalid", why=f"{count} is negative")


def required(value: str, field: str, *, limit_bytes: int = volumes.ID_MAX_BYTES) -> str:
    """`value`, present, short enough and free of control characters.

    Raises `MissingField`, `FieldTooLong`, `InvalidCharacters`.
    """
    if not value:
        raise MissingField(field)
    return optional(value, field, limit_bytes=limit_bytes)


def optional(value: str, field: str, *, limit_bytes: int = volumes.ID_MAX_BYTES) -> str:
    """`value`, which may be empty. Raises `FieldTooLong`, `InvalidCharacters`."""
    size_bytes = len(value.encode())
    if size_bytes > limit_bytes:
        raise FieldTooLong(field, size_bytes, limit_bytes)
    if _CONTROL.search(value):
        raise errors.InvalidRequest.named(
            "InvalidCharacters", f"{field} is invalid", why="it holds a control character"
        )
    return value


def mapping(values: Mapping[str, str], field: str) -> dict[str, str]:
    """A plain copy of a string map. Raises `FieldTooLong`."""
    size_bytes = sum(len(key.encode()) + len(value.encode()) for key, value in values.items())
    if size_bytes > MAP_MAX_BYTES:
        raise FieldTooLong(field, size_bytes, MAP_MAX_BYTES)
    return dict(values)


def check_context(values: Mapping[str, str], field: str) -> None:
    """Check a context, or secrets, against the size limit of maps. Raises `FieldTooLong`."""
    if not values:
        return
    mapping(
        {key: each for key, each in values.items() if not key.startswith(_KUBERNETES_PREFIX)}, field
    )


def check_secrets(request: object) -> None:
    """Check the secrets of a request, if it has any, against the size limit. Raises `FieldTooLong`."""
    check_context(getattr(request, "secrets", {}), "secrets")


def shortened(text: str) -> str:
    """`text`, shortened to the size limit of strings, for a response."""
    data = text.encode()
    if len(data) <= volumes.ID_MAX_BYTES:
        return text
    return data[: volumes.ID_MAX_BYTES - 3].decode("utf-8", "ignore") + "…"


def volume_id(value: str) -> volumes.VolumeId:
    """A volume id of a request. Raises `MissingField`, `FieldTooLong`, `InvalidCharacters`."""
    return volumes.VolumeId(required(value, "volume_id"))


def volume_id_of_any_driver(value: str) -> volumes.VolumeId:
    """The same for any driver's volume: its id may be longer than CSI says, up to what a record holds."""
    return volumes.VolumeId(required(value, "volume_id", limit_bytes=RECORDED_ID_MAX_BYTES))
