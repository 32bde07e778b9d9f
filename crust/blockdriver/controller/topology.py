"""The topology of volumes: only this node, one segment, `crust.dev/node`.

A requirement is met or not; there is no other place to try. Segment values are limited to 63 plain characters (CSI
TopologyRequirement) and node ids are not, so a digest replaces a node id that cannot be a value.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping

from crust.core import errors

KEY = "crust.dev/node"
_PREFIX_MAX_BYTES = 253
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_PREFIX = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")

Segments = tuple[tuple[str, str], ...]
"""One topology, sorted."""


class InvalidTopology(errors.InvalidRequest):
    def __init__(self, why: str) -> None:
        super().__init__("accessibility_requirements are invalid", why=why)


class TopologyNotAccessible(errors.Exhausted):
    def __init__(self, segment: str, kind: str = "volume") -> None:
        super().__init__(
            f"no {kind} can be made in the required topology",
            why=f"{kind}s of this pool can be used only at {KEY}={segment}",
        )


def value_of(node_id: str) -> str:
    """The segment's value for a node: its id, or a digest if the id cannot be a value."""
    if _LABEL.fullmatch(node_id):
        return node_id
    return f"node-{hashlib.sha256(node_id.encode()).hexdigest()[:40]}"


def segments(values: Mapping[str, str]) -> Segments:
    """Read one topology; raises `InvalidTopology`."""
    if not values:
        raise InvalidTopology("a topology has no segments")
    if len({key.lower() for key in values}) != len(values):
        raise InvalidTopology("two keys differ only in case")
    for key, value in values.items():
        prefix, slash, name = key.rpartition("/")
        bad_prefix = len(prefix) > _PREFIX_MAX_BYTES or not _PREFIX.fullmatch(prefix.lower())
        if not _LABEL.fullmatch(name) or (slash and bad_prefix):
            raise InvalidTopology(f"{key[:64]!r} is not a key of the form prefix/name")
        if not _LABEL.fullmatch(value):
            raise InvalidTopology(f"the value of {key} is not of 1 to 63 plain characters")
    return tuple(sorted((key.lower(), value) for key, value in values.items()))


def is_here(place: Segments, segment: str) -> bool:
    """Whether `place` is this node; always for a pool that every node reaches. Other keys are unknown here."""
    return not segment or place == ((KEY, segment),)


def is_met(
    requisite: Iterable[Mapping[str, str]], preferred: Iterable[Mapping[str, str]], segment: str
) -> bool:
    """Whether a volume of this node meets a requirement; preferences are no part. Raises `InvalidTopology`."""
    required, wanted = set(map(segments, requisite)), set(map(segments, preferred))
    if required and not wanted <= required:
        raise InvalidTopology("a preferred topology is not among the requisite ones")
    return not required or any(is_here(place, segment) for place in required)
