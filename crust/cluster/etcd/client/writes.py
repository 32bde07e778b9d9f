"""Transactions: what is compared first, what is done then, what is read if a comparison fails.

A transaction can be carried out twice, and the second time long after its caller had the answer to another attempt
(`client`). So each caller compares what makes a repetition change nothing, and reads in the same transaction what is
there instead:

| write | compares | why a late repetition changes nothing |
|---|---|---|
| all of a leader | the leader's key as it was written last | it is written again before the next one (`leadership`) |
| the leader's key | that there is none | it has the lease of that attempt, which nobody renews |
| an answer | that the request is the one that was delivered | the answer has removed the request |
| an announcement | the announcement as this node wrote it last | it is another one since, or the same |
| a retirement | that no node has written since the look | it writes the same values |
"""

from collections.abc import Callable, Sequence

from crust.cluster.etcd.client.client import CALL_S, Client
from crust.cluster.etcd.client.methods import RANGE, TXN
from crust.wire.etcd.v3 import etcd_pb2 as pb

MAX_OPERATIONS = 100
"""etcd takes 128 comparisons, and as many operations, in one transaction."""

_PAGE = 1000


def absent(key: bytes) -> pb.Compare:
    """`key` does not exist."""
    return created_at(key, 0)


def created_at(key: bytes, revision: int) -> pb.Compare:
    """`key` is the one that was created at `revision`: not another one that was since."""
    return pb.Compare(key=key, target=pb.Compare.CREATE, create_revision=revision)


def written_at(key: bytes, revision: int) -> pb.Compare:
    """`key` was written at `revision` and not since; 0 if it is not there."""
    return pb.Compare(key=key, target=pb.Compare.MOD, mod_revision=revision)


def unchanged(key: bytes, end: bytes, revision: int) -> pb.Compare:
    """No key from `key` up to `end` was written after `revision`; keys may have gone."""
    return pb.Compare(
        key=key,
        range_end=end,
        target=pb.Compare.MOD,
        result=pb.Compare.LESS,
        mod_revision=revision + 1,
    )


def put(key: bytes, value: bytes, lease: int = 0) -> pb.RequestOp:
    """Write `key`; with a lease it ends with the lease."""
    return pb.RequestOp(request_put=pb.PutRequest(key=key, value=value, lease=lease))


def delete(key: bytes, end: bytes = b"") -> pb.RequestOp:
    """Delete `key`, or all from it up to `end`."""
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key, range_end=end))


def get(key: bytes) -> pb.RequestOp:
    """Read `key`."""
    return pb.RequestOp(request_range=pb.RangeRequest(key=key))


def after_prefix(prefix: bytes) -> bytes:
    """The end of the range of all keys that begin with `prefix`."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


async def commit(  # noqa: PLR0913 - a transaction has as many parts
    client: Client,
    compare: Sequence[pb.Compare],
    success: Sequence[pb.RequestOp],
    otherwise: Sequence[pb.RequestOp] = (),
    *,
    what: str,
    timeout_s: float = CALL_S,
    in_doubt: Callable[[], None] = lambda: None,
) -> pb.TxnResponse:
    """Do `success` if all comparisons hold, else `otherwise`. `in_doubt` as `Client.call`.

    Raises `StoreUnavailable`, `LeaseGone`.
    """
    request = pb.TxnRequest(compare=compare, success=success, failure=otherwise)
    return await client.call(TXN, request, timeout_s, what=what, in_doubt=in_doubt)


def read(response: pb.TxnResponse, number: int) -> pb.KeyValue | None:
    """What the operation `number` of a transaction, a `get`, has found."""
    found = response.responses[number].response_range.kvs
    return found[0] if found else None


async def listing(
    client: Client, key: bytes, end: bytes, *, what: str
) -> tuple[int, list[pb.KeyValue]]:
    """All keys from `key` up to `end`, at one revision, and that revision. Raises `StoreUnavailable`."""
    kvs: list[pb.KeyValue] = []
    revision = 0
    while True:
        request = pb.RangeRequest(key=key, range_end=end, limit=_PAGE, revision=revision)
        page = await client.call(RANGE, request, what=what)
        revision = revision or page.header.revision
        kvs += page.kvs
        if not page.more:
            return revision, kvs
        key = page.kvs[-1].key + b"\0"
