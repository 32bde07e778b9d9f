"""Redaction of protobuf messages, and of errors that answer them, in log lines.

CSI marks credentials with the field option csi_secret. Two other places have no mark: mount flags, which the
specification calls sensitive, and values of string maps (a kubelet puts service account tokens into volume_context;
CVE-2023-2878 and CVE-2024-3744 came from logging it). This module redacts all three, at any depth.

A driver's error may repeat a secret of the request. Its status passes unchanged to the caller, who has sent the
secret; crust's log hides the secret's values in the forms in which programs write them, and parts of them
(`without_secrets`). The name of a user beside them is no secret: it is often a common word ("admin"), and a log
without that word says less.
"""

import base64
import functools
import json
import re
import urllib.parse
from collections.abc import Collection, Iterator, Mapping
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
_SEARCHED_CHARS = 64 << 10
"""Of all secrets of a request. CSI allows 4 KiB, and only tokens that a kubelet adds may be longer."""
_PART_CHARS = 8
"""As many characters of a secret, one after the other, are no accident."""


def describe(message: Message) -> dict[str, Any]:
    """The set fields of `message` as plain values, with `***` in place of every credential."""
    fields: dict[str, Any] = {}
    for field, value in message.ListFields():
        if is_marked(field) or field.name in _SENSITIVE_FIELDS:
            fields[field.name] = REDACTED
        elif isinstance(value, Mapping):
            fields[field.name] = {
                key: REDACTED if _is_sensitive(key) else _shown(entry)
                for key, entry in value.items()
            }
        else:
            fields[field.name] = list(map(_shown, value)) if field.is_repeated else _shown(value)
    return fields


@functools.cache
def is_marked(field: descriptor.FieldDescriptor) -> bool:
    """Whether a field is marked as a secret: by CSI's option, in crust.v1 by protobuf's own, debug_redact."""
    options = pool.options_of(field)
    marked: bool = options.Extensions[csi_pb2.csi_secret] or options.debug_redact
    return marked


def _is_sensitive(key: object) -> bool:
    return any(word in str(key).lower() for word in _SENSITIVE_WORDS)


def _shown(value: Any) -> Any:
    if isinstance(value, Message):
        return describe(value)
    return credentials.shown(value) if isinstance(value, str) else value


def without_secrets(text: str, request: object) -> str:
    """The error `text` of a call, cut, without the secrets of its request, if that is a message.

    Hidden are each secret in each of its forms (`_forms`), and each part of one that has `_PART_CHARS`: a library may
    cut it, or give one line of it.
    """
    text = text[: 2 * credentials.SHOWN_MAX_CHARS]
    if isinstance(request, Message):
        forms: set[str] = set()
        left = _SEARCHED_CHARS
        for value in _secrets(request):
            if left > 0:
                forms.update(_forms(value[:left]))
            left -= len(value)
        text = _without_parts(text, [form for form in forms if len(form) >= _PART_CHARS])
        for form in sorted(forms, key=len, reverse=True):
            if len(form) < _PART_CHARS:
                # one of three characters is hidden as a word only: it may be a part of other words
                word = re.escape(form)
                pattern = word if len(form) > 3 else rf"(?<!\w){word}(?!\w)"
                text = re.sub(pattern, credentials.HIDDEN, text)
    return credentials.shown(text)


def _forms(value: str) -> Iterator[str]:
    """A secret as it was sent, and as JSON, Python, Go, URLs and base64 write it."""
    in_json, in_go = json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]
    yield from (value, in_json, in_go)
    # in a string of JSON, as a log of JSON has them
    yield from (text.replace("\\", r"\\").replace('"', r"\"") for text in (in_json, in_go))
    yield re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", in_go)  # Go's encoding/json
    yield re.sub(r"\\u00([01].|7f)", r"\\x\1", in_go)  # Go's %q
    data = value.encode()
    yield from (repr(value)[1:-1], repr(data)[2:-1])
    quoted = urllib.parse.quote(data)
    yield from (quoted, urllib.parse.quote(data, safe=""), urllib.parse.quote_plus(data))
    if len(data) < _PART_CHARS:
        return
    # base64 in both alphabets, behind 0, 1 and 2 other bytes, without the characters that have bits of other bytes
    for before in range(3):
        encoded = base64.b64encode(bytes(before) + data).decode().rstrip("=")
        is_whole = (before + len(data)) % 3 == 0
        inner = encoded[(0, 2, 3)[before] : None if is_whole else -1]
        yield from (inner, inner.translate(str.maketrans("+/", "-_")))


def _without_parts(text: str, forms: Collection[str]) -> str:
    """Hide each place whose characters are a part of a form. In proportion to the length of text and forms."""
    sought = {text[at : at + _PART_CHARS] for at in range(len(text) - _PART_CHARS + 1)}
    parts: set[str] = set()
    for form in forms:
        ends = range(_PART_CHARS, len(form) + 1)
        parts |= sought.intersection(form[end - _PART_CHARS : end] for end in ends)
    shown, end = [], 0
    for at in range(len(text)):
        if text[at : at + _PART_CHARS] in parts:
            if at >= end:
                shown.append(credentials.HIDDEN)
            end = at + _PART_CHARS
        elif at >= end:
            shown.append(text[at])
    return "".join(shown)


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
