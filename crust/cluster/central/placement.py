"""Which pool gets a new volume: a pure function of what the nodes announced, the request and the name.

The required topology and the size leave nodes out, the first preferred topology that a node is in puts it forward.
Among equals the name decides, by rendezvous hashing weighted with the free capacity: a retry meets the same node as
long as the announcements are the same, many volumes spread in proportion to what is free, and a burst of creations
does not go to the one node that was the emptiest when it announced itself.

An announcement is older than what its node has just answered. So a node that had too little, and has
freed some since, is put behind those that have enough, and decides itself.
"""

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from crust import errors
from crust.cluster.protocol import Announcement

Segments = Mapping[str, str]


class NoNodeForVolume(errors.Exhausted):
    """No node can take the volume (CSI CreateVolume: RESOURCE_EXHAUSTED, so the pod is scheduled again)."""

    def __init__(self, why: str) -> None:
        super().__init__(
            "no node can take the volume",
            why=why,
            hint="free capacity, connect the nodes that are away, or let the scheduler choose other ones",
        )


class NoNodeConnected(errors.PeerUnavailable):
    """No node at all is connected (UNAVAILABLE: another node for the pod would not help, waiting does)."""

    def __init__(self) -> None:
        super().__init__(
            "no node can take the volume",
            why="no node is connected",
            hint="look at the nodes' drivers and at their way to etcd; the same call succeeds when one is back",
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a new volume needs; `required_bytes` is 0 where any size will do."""

    name_key: str
    requisite: Sequence[Segments] = ()
    preferred: Sequence[Segments] = ()
    required_bytes: int = 0


def choose(
    wanted: Wanted, nodes: Iterable[Announcement], freed: Collection[str] = ()
) -> tuple[Announcement, ...]:
    """The nodes that can take the volume, the best first. Raises `NoNodeForVolume`, `NoNodeConnected`.

    `freed`: the pools that may have more free capacity than their nodes announced.
    """
    nodes = tuple(nodes)
    if not nodes:
        raise NoNodeConnected()
    candidates = [each for each in nodes if not _misfit(wanted, each)]
    fit = [each for each in candidates if not _shortage(wanted, each)]
    perhaps = [each for each in candidates if _shortage(wanted, each) and each.pool_id in freed]
    if not fit and not perhaps:
        raise NoNodeForVolume(_summary([obstacle(wanted, each) for each in nodes]))
    return tuple(
        each
        for part in (fit, perhaps)
        for each in sorted(part, key=lambda each: _rank(wanted, each))
    )


def obstacle(wanted: Wanted, node: Announcement) -> str:
    """Why the node cannot take the volume, by what it announced; empty if it can."""
    return _misfit(wanted, node) or _shortage(wanted, node)


def _misfit(wanted: Wanted, node: Announcement) -> str:
    if wanted.requisite and not any(is_in(node.segments, each) for each in wanted.requisite):
        return "not in the required topology"
    return "" if node.is_ready else "without its pool"


def _shortage(wanted: Wanted, node: Announcement) -> str:
    if node.max_volumes and node.volumes >= node.max_volumes:
        return "with the most volumes that it can have"
    if max(wanted.required_bytes, 1) > min(node.capacity_bytes, node.maximum_bytes):
        return "without the capacity"
    return ""


def is_in(segments: Segments, topology: Segments) -> bool:
    """Whether a node with these segments is in the topology. Keys are compared without case (CSI)."""
    here = {key.lower(): value for key, value in segments.items()}
    return all(here.get(key.lower()) == value for key, value in topology.items())


def _rank(wanted: Wanted, node: Announcement) -> tuple[int, float, str]:
    preferred = (n for n, each in enumerate(wanted.preferred) if is_in(node.segments, each))
    first = next(preferred, len(wanted.preferred))
    return first, _distance(wanted.name_key, node), node.pool_id


def _distance(name_key: str, node: Announcement) -> float:
    """The smaller, the better; a node's chance to have the smallest is its share of the free capacity."""
    data = hashlib.sha256(f"{name_key}\0{node.pool_id}".encode()).digest()
    uniform = (int.from_bytes(data[:8], "big") + 1) / (2**64 + 1)
    return -math.log(uniform) / max(node.capacity_bytes, 1)


def _summary(refused: Sequence[str]) -> str:
    counted = [f"{refused.count(why)} {why}" for why in dict.fromkeys(refused)]
    return f"of {len(refused)} connected nodes: {', '.join(counted)}"
