"""What an operator may retire: a pure function of what the store has at one moment.

A retired pool is never served again, and its volumes count as deleted. So nothing is retired that a connected node
announces: its volumes may be in use.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from crust import errors


class NodeStillConnected(errors.NotReady):
    """A node that is connected is to be retired."""

    def __init__(self, node_id: str) -> None:
        super().__init__(
            f"the node {node_id} is not retired",
            why="it is connected, and its volumes may be in use",
            hint="stop its driver first; a retired pool is never served again",
        )


class PoolStillAnnounced(errors.NotReady):
    """A pool is to be retired that a connected node announces."""

    def __init__(self, pool_id: str, node_id: str) -> None:
        super().__init__(
            f"the pool {pool_id} is not retired",
            why=f"the node {node_id} announces it, and its volumes may be in use",
            hint="stop that node's driver first; if the disk was moved there, nothing is to be retired",
        )
        self.pool_id = pool_id


class PoolOfKnownNode(errors.NotReady):
    """A pool is to be retired by its id, and its node is known."""

    def __init__(self, pool_id: str, node_id: str) -> None:
        super().__init__(
            f"the pool {pool_id} is not retired",
            why=f"it is a pool of the node {node_id}",
            hint=f"run `crust cluster retire {node_id}`",
        )
        self.pool_id = pool_id


class NoSuchClusterNode(errors.NotFound):
    """No pool of this node is known."""

    def __init__(self, node_id: str) -> None:
        super().__init__(f"there is no node {node_id!r}", why="the cluster knows no pool of it")


@dataclass(frozen=True, slots=True)
class Known:
    """What the cluster knows at one point in time."""

    announced: Mapping[str, str]
    """The pool of each connected node; empty where it cannot be read."""
    pools: Mapping[str, str]
    """The node that announced each pool last; retired ones may be among them."""
    retired: Mapping[str, str]
    """Each retired pool with the node of which it was; empty if that was not known."""


def of_node(known: Known, node_id: str) -> tuple[str, ...]:
    """The pools that are retired with the node; of one that was retired before, its pools.

    Raises `NodeStillConnected`, `PoolStillAnnounced`, `NoSuchClusterNode`.
    """
    if node_id in known.announced:
        raise NodeStillConnected(node_id)
    before = {pool for pool, node in known.retired.items() if node == node_id}
    pools = before | {pool for pool, node in known.pools.items() if node == node_id}
    if not pools:
        raise NoSuchClusterNode(node_id)
    for pool_id in sorted(pools - set(known.retired)):
        _check_unannounced(known, pool_id)
    return tuple(sorted(pools))


def check_pool(known: Known, pool_id: str) -> None:
    """Raise `PoolStillAnnounced` or `PoolOfKnownNode` if the pool is not to be retired by its id."""
    _check_unannounced(known, pool_id)
    node_id = known.pools.get(pool_id)
    if node_id and pool_id not in known.retired:
        raise PoolOfKnownNode(pool_id, node_id)


def _check_unannounced(known: Known, pool_id: str) -> None:
    for node_id, announced in known.announced.items():
        if announced == pool_id:
            raise PoolStillAnnounced(pool_id, node_id)
