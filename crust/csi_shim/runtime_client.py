"""The shim's client of the proxy's Runtime API (KEP-2857)."""

from crust.core import volumes
from crust.rpc import status
from crust.rpc.messages import crust_v1
from crust.rpc.port import Port, stub
from crust.rpc.status import PeerStatus
from crust.wire.v1 import runtime_pb2, runtime_pb2_grpc

STATS_TIMEOUT_S = 10.0
"""A kubelet asks once a minute and waits two minutes: calls to a hung guest must not accumulate."""

EXPAND_TIMEOUT_S = 100.0
"""Below the kubelet's two minutes, so that it gets this error and not its own deadline."""


class RuntimeClient:
    """Calls the proxy for a volume, by its target path. Raises the proxy's errors, or `PeerUnavailable`."""

    def __init__(self, port: Port) -> None:
        self._stub = stub(runtime_pb2_grpc.RuntimeStub, port)

    async def stats(self, target_path: str) -> volumes.VolumeStats:
        """Statistics from the kernel that has the volume mounted."""
        request = runtime_pb2.RuntimeGetVolumeStatsRequest(volume_target_path=target_path)
        try:
            answer = await self._stub.RuntimeGetVolumeStats(request, timeout=STATS_TIMEOUT_S)
        except PeerStatus as err:
            raise status.to_error(err) from err
        condition = answer.volume_condition if answer.HasField("volume_condition") else None
        return crust_v1.stats(answer.usage, condition)

    async def expand(
        self, target_path: str, capacity: volumes.CapacityRange, time_left_s: float | None
    ) -> int:
        """Grow the filesystem to its device's size; returns that size in bytes."""
        request = runtime_pb2.RuntimeExpandVolumeRequest(
            volume_target_path=target_path,
            capacity_range=crust_v1.capacity_range_to_wire(capacity),
        )
        # the driver has used some of the caller's time; the proxy answers a little before ours ends
        timeout_s = EXPAND_TIMEOUT_S
        if time_left_s is not None:
            timeout_s = min(timeout_s, time_left_s * 0.98)
        try:
            answer = await self._stub.RuntimeExpandVolume(request, timeout=timeout_s)
        except PeerStatus as err:
            raise status.to_error(err) from err
        return answer.capacity_bytes
