"""How long a caller of the driver waits, by the kind of its call; and calls that only read.

A deadline ends the wait, never the work (docs/decisions/0016): what a change has begun goes on under its volume's
key, and its callers get ABORTED until it has ended. So the times are those after which a person should look, and
none needs to be exact. Work that takes long by its nature has an hour: copies, mkfs and e2fsck, which have limits of
their own, and fsGroup of many files.
"""

from collections.abc import Callable, Coroutine, Hashable, Iterable
from typing import Any, TypeVar

from crust.core import operations, volumes
from crust.rpc.call import Call

T = TypeVar("T")

_CHANGE_S = 120.0
"""As long as a kubelet waits."""

_LONG_S = 3600.0
_LONG = frozenset(
    {
        "CreateVolume",
        "CreateSnapshot",
        "CreateVolumeGroupSnapshot",
        "NodeStageVolume",
        "NodePublishVolume",
    }
)
_READ_S = 30.0


def change_s(rpc: str) -> float:
    """How long a change may take before its callers are told that it is overdue."""
    return _LONG_S if rpc in _LONG else _CHANGE_S


async def change(  # noqa: PLR0913 - an operation, and its caller
    running: operations.KeyedOperations,
    key: volumes.VolumeKey,
    rpc: str,
    identity: object,
    work: Callable[[], Coroutine[Any, Any, T]],
    call: Call,
    *,
    also: Iterable[volumes.VolumeKey] = (),
) -> T:
    """Run a change as the operation of `key` and of `also`, within the time of its kind and its caller's."""
    return await running.run(
        key,
        rpc,
        identity,
        work,
        also=also,
        limit_s=change_s(rpc),
        left_s=call.time_remaining(),
    )


class Reads:
    """Calls that only read: a thread for each question at most, however often it is asked."""

    def __init__(self, running: operations.KeyedOperations) -> None:
        self._running = running

    async def read(self, rpc: str, asked: Hashable, function: Callable[[], T], call: Call) -> T:
        """What `function` returns now; `rpc` and `asked` are the question. Raises as `KeyedOperations.look`."""
        timeout_s = _read_s(call.time_remaining())
        return await self._running.look(
            (rpc, asked), function, timeout_s=timeout_s, shown=rpc, fresh=True
        )


def _read_s(left_s: float | None) -> float:
    return _READ_S if left_s is None else min(_READ_S, left_s * operations.ANSWER_AT)
