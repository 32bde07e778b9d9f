"""A failed comparison of a case in words, for people who have not the suite's code before them.

Of two sets the sentence has the elements that differ, because long ones, shortened, look equal. A value that is no
number, text, message or collection of these is shown by its kind.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from google.protobuf.message import Message

from crust.rpc.messages import redaction

_SHOWN_MAX_CHARS = 200
_BYTES_MAX = 16
BEGIN = "found "
"""How each such sentence begins."""
_MUST_BE: Mapping[str, str] = {
    "==": "must be",
    "!=": "must not be",
    "<": "must be less than",
    "<=": "must be at most",
    ">": "must be more than",
    ">=": "must be at least",
    "in": "must be among",
    "not in": "must not be among",
    "is": "must be",
    "is not": "must not be",
}


def in_words(operator: str, left: object, right: object) -> str:
    """The sentence of `left operator right`, which is false."""
    if isinstance(left, frozenset | set) and isinstance(right, frozenset | set):
        return _of_sets(operator, left, right)
    return f"{BEGIN}{_shown(left)}, {_MUST_BE[operator]} {_shown(right)}"


def _of_sets(operator: str, left: Collection[object], right: Collection[object]) -> str:
    """Which elements are wrong: the sets can be long."""
    surplus = [each for each in left if each not in right]
    missing = [each for each in right if each not in left]
    parts = []
    if surplus and operator != ">=":
        parts.append(f"{_shown(surplus)}, which must not be there")
    if missing and operator != "<=":
        parts.append(f"not {_shown(missing)}, which must be there")
    return BEGIN + (" and ".join(parts) or f"{_shown(left)}, {_MUST_BE[operator]} {_shown(right)}")


def _shown(value: object) -> str:
    for kind, show in _SHOWN.items():
        if isinstance(value, kind):
            text = show(value)
            return text if len(text) <= _SHOWN_MAX_CHARS else f"{text[:_SHOWN_MAX_CHARS]}…"
    return f"a {type(value).__name__}"


def _list(values: Collection[object]) -> str:
    shown = list(map(_shown, values))
    return f"[{', '.join(sorted(shown) if isinstance(values, set | frozenset) else shown)}]"


def _mapping(value: Mapping[Any, object]) -> str:
    return f"{{{', '.join(f'{_shown(key)}: {_shown(item)}' for key, item in value.items())}}}"


def _bytes(value: bytes) -> str:
    rest = "…" if len(value) > _BYTES_MAX else ""
    return f"{len(value)} bytes ({value[:_BYTES_MAX].hex(' ')}{rest})"


_SHOWN: Mapping[type, Callable[..., str]] = {
    bool: lambda value: "true" if value else "false",
    type(None): lambda _: "nothing",
    int: str,
    float: lambda value: f"{value:g}",
    str: lambda value: f'"{value}"' if value else "an empty text",
    bytes: _bytes,
    Message: lambda value: f"{value.DESCRIPTOR.name} {_mapping(redaction.describe(value))}",
    Mapping: _mapping,
    Collection: _list,
}
