"""The only function that puts a protobuf message into a log line.

CSI marks credentials with the field option csi_secret. Two other places are not marked: mount flags, which the
specification calls sensitive, and values of string maps (a kubelet puts service account tokens into volume_context;
CVE-2023-2878 and CVE-2024-3744 came from logging it). This module redacts all three, at any depth.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf import descriptor
from google.protobuf.message import Message

from crust.wire.csi.v1 import csi_pb2

REDACTED = "***"
_SENSITIVE_FIELDS = frozenset({"mount_flags", "mount_options", "options"})
_SENSITIVE_WORDS = ("secret", "token", "password", "passphrase", "credential", "key")


def describe(message: Message) -> dict[str, Any]:
    """The set fields of `message` as plain values, with `***` in place of every credential."""
    return dict(_fields(message))


def _fields(message: Message) -> Iterator[tuple[str, Any]]:
    for field, value in message.ListFields():
        if _is_secret(field):
            yield field.name, REDACTED
        elif isinstance(value, Mapping):
            yield field.name, {key: _entry(key, each) for key, each in value.items()}
        elif field.message_type is None:
            yield field.name, list(value) if field.is_repeated else value
        elif field.is_repeated:
            yield field.name, [describe(each) for each in value]
        else:
            yield field.name, describe(value)


def _is_secret(field: descriptor.FieldDescriptor) -> bool:
    marked: bool = field.GetOptions().Extensions[csi_pb2.csi_secret]
    return marked or field.name in _SENSITIVE_FIELDS


def _entry(key: object, value: Any) -> Any:
    if any(word in str(key).lower() for word in _SENSITIVE_WORDS):
        return REDACTED
    return describe(value) if isinstance(value, Message) else value
