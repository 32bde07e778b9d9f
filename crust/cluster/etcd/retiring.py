"""Retires a node or a pool: one look, and one transaction that holds only if no node has written since.

A node that connects, or a disk that moves, between the look and the transaction makes the comparison fail, and then
all is looked at again. The comparison is of all keys of all nodes, because which node a disk moves to is not known.
So an announcement of a node that has nothing to do with it costs another look.

Nothing says whether a transaction whose answer was lost has taken place. Its repetition writes the same values, and a
node whose pools are retired already is a success.
"""

import time
from collections.abc import Callable, Sequence

from crust.cluster import retirement
from crust.cluster.etcd import keys as kinds
from crust.cluster.etcd import records
from crust.cluster.etcd.client import writes
from crust.cluster.etcd.client.client import CALL_S, Client
from crust.cluster.etcd.keys import Keys
from crust.cluster.protocol import StoreUnavailable
from crust.cluster.retirement import Known
from crust.wire.etcd.v3 import etcd_pb2 as pb

Decide = Callable[[Known], Sequence[pb.RequestOp]]


async def retire(client: Client, layout: Keys, node_id: str) -> tuple[str, ...]:
    """As `ControllerSide.retire`."""
    pools: tuple[str, ...] = ()

    def decide(known: Known) -> Sequence[pb.RequestOp]:
        nonlocal pools
        pools = retirement.of_node(known, node_id)
        new = [each for each in pools if each not in known.retired]
        record = [writes.put(layout.decommissioned(each), node_id.encode()) for each in new]
        # the node is forgotten with the last of them: what a failure leaves is found again
        return [*record, writes.delete(*layout.node(node_id))]

    await _write(client, layout, decide, what=f"node {node_id} is not retired")
    return pools


async def retire_pool(client: Client, layout: Keys, pool_id: str) -> None:
    """As `ControllerSide.retire_pool`."""

    def decide(known: Known) -> Sequence[pb.RequestOp]:
        retirement.check_pool(known, pool_id)
        return [] if pool_id in known.retired else [writes.put(layout.decommissioned(pool_id), b"")]

    await _write(client, layout, decide, what=f"pool {pool_id} is not retired")


async def _write(client: Client, layout: Keys, decide: Decide, *, what: str) -> None:
    ends_s = time.monotonic() + CALL_S
    while time.monotonic() < ends_s:
        revision, known = await _look(client, layout, what)
        if await _commit(client, layout, revision, decide(known), what):
            return
    why = "nodes have written between each look and its transaction"
    raise StoreUnavailable(what, why, "repeat the command when fewer volumes are created")


async def _commit(
    client: Client, layout: Keys, revision: int, operations: Sequence[pb.RequestOp], what: str
) -> bool:
    """Write in one transaction, in more where it has too many operations; whether no node wrote meanwhile."""
    compare = [writes.unchanged(*layout.nodes(), revision)]
    size = writes.MAX_OPERATIONS
    for first in range(0, len(operations), size):
        batch = operations[first : first + size]
        if not (await writes.commit(client, compare, batch, what=what)).succeeded:
            return False
    return True


async def _look(client: Client, layout: Keys, what: str) -> tuple[int, Known]:
    revision, kvs = await writes.listing(client, *layout.followed(), what=what)
    announced: dict[str, str] = {}
    pools: dict[str, str] = {}
    retired: dict[str, str] = {}
    for kv in sorted(kvs, key=lambda kv: kv.mod_revision):  # a pool is where it was announced last
        key = layout.parse(kv.key)
        if key is None:
            continue
        if key.directory == "decommissioned":
            retired[key.name] = kv.value.decode(errors="replace")
        elif key.kind == kinds.POOL:
            pools[key.id] = key.name
        elif key.kind == kinds.ANNOUNCE:
            announced[key.name] = _pool_in(kv)
    return revision, Known(announced, pools, retired)


def _pool_in(kv: pb.KeyValue) -> str:
    try:
        return records.decode(records.AnnouncementRecord, kv.key, kv.value).pool_id
    except records.StoreValueInvalid:
        return ""
