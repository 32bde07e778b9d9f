"""What holds for every answer of a driver: the size limits, and that a refusal has a message and no details."""

from collections.abc import Iterator

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

STRING_MAX_BYTES = 128
MAP_MAX_BYTES = 4096
_OTHER_LIMITS = {"csi.v1.NodeGetInfoResponse.node_id": 256}
_EXTENSIONS = ("csi.v1.DeferredMount",)
"""Not of the specification: its paths and options have limits of their own."""
_DETAILS = "grpc-status-details-bin"


def check_limits(answer: Message) -> None:
    """CSI "Size Limits" hold in both directions; raises AssertionError that names the field."""
    for name, size_bytes, limit in _sizes(answer):
        assert size_bytes <= limit, f"{name} has {size_bytes} bytes, CSI allows {limit}"


def check_refusal(error: grpc.RpcError) -> None:
    """CSI "Error Scheme": a message that a human can read, and no details."""
    assert isinstance(error, grpc.Call)
    assert (error.details() or "").strip(), f"{error.code()} came without a message"
    keys = [key for key, _ in error.trailing_metadata() or ()]
    assert _DETAILS not in keys, f"{error.code()} came with status details, which CSI forbids"


def _sizes(message: Message) -> Iterator[tuple[str, int, int]]:
    for field, value in message.ListFields():
        kind = field.message_type
        if kind is None:
            if field.type == FieldDescriptor.TYPE_STRING:
                yield from _strings(field, value)
        elif kind.GetOptions().map_entry:
            yield field.full_name, _map_bytes(value), MAP_MAX_BYTES
        elif kind.full_name not in _EXTENSIONS:
            for each in value if field.is_repeated else [value]:
                yield from _sizes(each)


def _strings(field: FieldDescriptor, value: object) -> Iterator[tuple[str, int, int]]:
    limit = _OTHER_LIMITS.get(field.full_name, STRING_MAX_BYTES)
    for each in [value] if isinstance(value, str) else list(value):  # type: ignore[call-overload]
        yield field.full_name, len(each.encode()), limit


def _map_bytes(value: dict[str, str]) -> int:
    return sum(len(key.encode()) + len(each.encode()) for key, each in value.items())
