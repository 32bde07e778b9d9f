"""What the bytes of a request, and the name of its method, say; size limits and required fields of CSI's requests.

A string has at most 128 bytes and a map at most 4 KiB, keys and values together, unless its field says otherwise
(CSI "Size Limits"). A kubelet puts pod data and service account tokens into contexts and secrets under keys of its
own, and these alone may be longer, so they are not counted. Errors name the field and its length, never its content.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message

from crust.core import errors, volumes
from crust.wire.csi.v1 import csi_pb2
from crust.wire.pluginregistration.v1 import api_pb2
from crust.wire.v1 import handlers_pb2, inspect_pb2, pool_pb2, runtime_pb2

MAP_MAX_BYTES = 4096
RECORDED_ID_MAX_BYTES = 512
"""What a record of the handoff directory holds. Public drivers have ids of 250 bytes, and no CO refuses them."""

_KUBERNETES_PREFIX = "csi.storage.k8s.io/"
_CONTROL = re.compile("[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f]")


@cache
def methods() -> Mapping[str, MethodDescriptor]:
    """All that crust serves or passes, by full name (`/csi.v1.Node/NodeStageVolume`): CSI's, its own, a kubelet's."""
    files = (csi_pb2, runtime_pb2, handlers_pb2, inspect_pb2, pool_pb2, api_pb2)
    services = [each for file in files for each in file.DESCRIPTOR.services_by_name.values()]
    return {f"/{of.full_name}/{method.name}": method for of in services for method in of.methods}


def is_unary(method: str) -> bool:
    """Whether a method is known, and has one request and one answer."""
    known = methods().get(method)
    return known is not None and not (known.client_streaming or known.server_streaming)


def parse(method: str, data: bytes) -> Any:
    """The request of a call, with its unknown fields; None if its method is not known.

    Raises `MalformedMessage`.
    """
    known = methods().get(method)
    if known is None:
        return None
    try:
        return message_factory.GetMessageClass(known.input_type).FromString(data)
    except DecodeError as err:
        raise errors.InvalidRequest.named(
            "MalformedMessage",
            f"the request cannot be parsed as {known.input_type.full_name}",
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


class MissingField(errors.InvalidRequest):
    """A REQUIRED field is not set."""

    def __init__(self, field: str) -> None:
        super().__init__(f"{field} is missing", why="CSI requires it", hint=f"set {field}")


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


def check_page(max_entries: int, token: str, is_token: Callable[[str], bool]) -> None:
    """Check what is asked of a list. Raises `NegativeMaxEntries`, and `InvalidStartingToken` for any other token.

    CSI ListVolumes: ABORTED for the token, and the CO starts over.
    """
    if max_entries < 0:
        raise errors.InvalidRequest.named(
            "NegativeMaxEntries", "max_entries is invalid", why=f"{max_entries} is negative"
        )
    if token and not is_token(token):
        raise errors.OperationPending.named(
            "InvalidStartingToken",
            f"the starting_token {token[:64]!r} is invalid",
            why="this driver did not issue it",
            hint="start from the beginning, without a token",
        )


def required(value: str, field: str, *, limit_bytes: int = volumes.ID_MAX_BYTES) -> str:
    """`value`, present, short enough and free of control characters.

    Raises `MissingField`, `FieldTooLong`, `InvalidCharacters`.
    """
    if not value:
        raise MissingField(field)
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
