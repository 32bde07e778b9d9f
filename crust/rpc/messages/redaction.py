"""Redaction of protobuf messages, and of errors that answer them, in log lines.

CSI marks credentials with the field option csi_secret. Two other places have no mark: mount flags, which the
specification calls sensitive, and values of string maps (a kubelet puts service account tokens into volume_context;
CVE-2023-2878 and CVE-2024-3744 came from logging it). This module redacts all three, at any depth.

A driver's error may repeat a secret of the request. Its status passes unchanged to the caller, who has sent the
secret; crust's log hides the secret's values in any form. The name of a user beside them is no secret: it is often a
common word ("admin"), and a log without that word says less.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf import descriptor
from google.protobuf.message import Message

from crust.core import credentials
from crust.wire import pool
from crust.wire.csi.v1 import csi_pb2

REDACTED = credentials.HIDDEN
_SENSITIVE_FIELDS = frozenset({"mount_flags", "mount_options", "options"})
_NAMES_OF_USERS = frozenset({"userid", "adminid", "username", "user"})
"""Keys of secrets, in lower case, whose value is a user's name: `userID` of Ceph's drivers, `username` of iSCSI's."""
_SENSITIVE_WORDS = ("secret", "token", "password", "passphrase", "credential", "key")


def describe(message: Message) -> dict[str, Any]:
    """The set fields of `message` as plain values, with `***` in place of every credential."""
    return dict(_fields(message))


def _fields(message: Message) -> Iterator[tuple[str, Any]]:
    for field, value in message.ListFields():
        if is_marked(field) or field.name in _SENSITIVE_FIELDS:
            yield field.name, REDACTED
        elif isinstance(value, Mapping):
            yield field.name, {key: _entry(key, entry) for key, entry in value.items()}
        elif field.message_type is None:
            yield field.name, [_text(item) for item in value] if field.is_repeated else _text(value)
        elif field.is_repeated:
            yield field.name, [describe(item) for item in value]
        else:
            yield field.name, describe(value)


@functools.cache
def is_marked(field: descriptor.FieldDescriptor) -> bool:
    """Whether a field is marked as a secret: by CSI's option, in crust.v1 by protobuf's own, debug_redact."""
    options = pool.options_of(field)
    marked: bool = options.Extensions[csi_pb2.csi_secret] or options.debug_redact
    return marked


def _is_sensitive(key: object) -> bool:
    return any(word in str(key).lower() for word in _SENSITIVE_WORDS)


def _entry(key: object, value: Any) -> Any:
    if _is_sensitive(key):
        return REDACTED
    return describe(value) if isinstance(value, Message) else _text(value)


def _text(value: Any) -> Any:
    return credentials.shown(value) if isinstance(value, str) else value


def without_secrets(text: str, request: object) -> str:
    """The error `text` of a call, cut, without the secrets of its request, if that is a message."""
    text = text[: 2 * credentials.SHOWN_MAX_CHARS]
    if isinstance(request, Message):
        for value in sorted(_secrets(request), key=len, reverse=True):
            pattern = (
                re.escape(value) if len(value) > _SHORT else rf"(?<!\w){re.escape(value)}(?!\w)"
            )
            text = re.sub(pattern, credentials.HIDDEN, text)
    return credentials.shown(text)


_SHORT = 3
"""A value of at most so many characters is hidden as a word only: it may be a part of other words."""


def _secrets(message: Message) -> Iterator[str]:
    """The values of its secrets. CSI marks only maps."""
    for field, value in message.ListFields():
        if isinstance(value, Mapping):
            marked = is_marked(field)
            for key, entry in value.items():
                names_user = str(key).rpartition(".")[2].lower() in _NAMES_OF_USERS
                is_secret = _is_sensitive(key) or (marked and not names_user)
                if entry and isinstance(entry, str) and is_secret:
                    yield entry
        elif field.message_type is not None:
            for part in value if field.is_repeated else [value]:
                yield from _secrets(part)
