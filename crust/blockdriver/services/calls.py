"""The common part of the services: deadlines by the kind of a call, calls that only read, and shared answers.

A deadline ends the wait, never the work (docs/decisions/0016): a change goes on under its volume's key, and its
callers get ABORTED until it has ended. So each time is a hint for a person to look, and none needs to be exact. Work
that takes long by its nature has an hour: copies, mkfs and e2fsck, which have limits of their own, and fsGroup of
many files.
"""

from collections.abc import Callable, Coroutine, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from crust.blockdriver.records.health import Health
from crust.core import operations
from crust.rpc.call import Call
from crust.rpc.messages import csi
from crust.wire.csi.v1 import csi_pb2

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


@dataclass(frozen=True, slots=True)
class Calls:
    running: operations.KeyedOperations
    places: tuple[csi_pb2.Topology, ...] = ()
    """The topology of this node; none if every node reaches the pool."""

    async def change(
        self,
        volume_or_set_id: str,
        identity: object,
        work: Callable[[], Coroutine[Any, Any, T]],
        call: Call,
        *,
        also: Iterable[str] = (),
        ended_by: object = None,
    ) -> T:
        """Run a change as the operation of a volume, snapshot or group, and of the ids in `also`, within the deadline
        of its kind and of its caller; `ended_by` as in `KeyedOperations.run`.
        """
        rpc, left_s = call.method.rpartition("/")[2], call.time_remaining()
        limit_s = _LONG_S if rpc in _LONG else _CHANGE_S
        return await self.running.run(
            volume_or_set_id,
            rpc,
            identity,
            work,
            also=also,
            ended_by=ended_by,
            limit_s=limit_s,
            left_s=left_s,
        )

    async def read(self, question: Hashable, function: Callable[[], T], call: Call) -> T:
        """The result of `function` now. The RPC and `question` are the key of at most one thread, for any number of
        callers. Raises as `KeyedOperations.look`.
        """
        rpc, left_s = call.method.rpartition("/")[2], call.time_remaining()
        return await self.running.look(
            (rpc, question), function, timeout_s=_READ_S, left_s=left_s, shown=rpc, fresh=True
        )


def health(value: Health) -> csi_pb2.VolumeHealth:
    """A volume's health (CSI 1.13): healthy without entries."""
    pb = csi_pb2.VolumeHealth(volume_id=value.volume_id)
    for finding in value.findings:
        pb.health_statuses.add(
            status=csi_pb2.VolumeHealthErrorType.ValueType(finding.kind.value),
            reason=finding.reason,
            message=csi.shortened(finding.message),
        )
    return pb
