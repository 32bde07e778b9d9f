"""The flagged calls of a driver that defers by itself.

A publish passes to the driver unchanged, if the driver defers now: an older version, which may have replaced it,
would mount on the host. The caller checks the answer, and undoes the publish if it is wrong (specs/deferral.md, D-10
and D-11). Statistics come from the kernel that has the volume mounted, through the proxy's Runtime API (KEP-2857); an
expansion goes to the driver first and then there.
"""

import os

from crust.core import volumes
from crust.rpc.call import Call
from crust.rpc.csi_driver import CsiDriver
from crust.rpc.messages import crust_v1, csi
from crust.rpc.port import Port, stub
from crust.rpc.serving.service import Methods, csi_methods
from crust.wire.csi.v1 import csi_pb2
from crust.wire.v1 import runtime_pb2, runtime_pb2_grpc

STATS_TIMEOUT_S = 10.0
"""A kubelet asks once a minute and waits two minutes: calls to a hung guest must not accumulate."""

UNUSED_TIMEOUT_S = 30.0
"""For a look at the open files of all processes, and two seconds for writes in flight."""

EXPAND_TIMEOUT_S = 100.0
"""Below the kubelet's two minutes, so that it gets this error and not its own deadline."""


class RuntimeClient:
    """Calls the proxy for a volume, by its target path. Raises the proxy's errors, or `PeerUnavailable`."""

    def __init__(self, port: Port) -> None:
        self._stub = stub(runtime_pb2_grpc.RuntimeStub, port, raises_errors=True)

    async def stats(self, target_path: str) -> volumes.VolumeStats:
        """Statistics from the kernel that has the volume mounted."""
        request = runtime_pb2.RuntimeGetVolumeStatsRequest(volume_target_path=target_path)
        answer = await self._stub.RuntimeGetVolumeStats(request, timeout=STATS_TIMEOUT_S)
        condition = answer.volume_condition if answer.HasField("volume_condition") else None
        return crust_v1.stats(answer.usage, condition)

    async def expand(
        self, target_path: str, capacity: volumes.CapacityRange, time_left_s: float | None
    ) -> int:
        """Grow the filesystem to its device's size; returns that size in bytes."""
        request = runtime_pb2.RuntimeExpandVolumeRequest(
            volume_target_path=target_path, capacity_range=crust_v1.capacity_range_to_wire(capacity)
        )
        # the driver has used some of the caller's time; the proxy must answer before the shim's deadline
        timeout_s = EXPAND_TIMEOUT_S
        if time_left_s is not None:
            timeout_s = min(timeout_s, time_left_s * 0.98)
        answer = await self._stub.RuntimeExpandVolume(request, timeout=timeout_s)
        return answer.capacity_bytes

    async def check_unused(self, number: int) -> None:
        """Return if no process writes to the device of this number (`st_rdev`), or the kernel has none.

        Raises the proxy's `DeviceInUse`, `WritesInFlight`, `NotSeen`. A proxy that is away has not seen it.
        """
        request = runtime_pb2.RuntimeCheckDeviceUnusedRequest(
            major=os.major(number), minor=os.minor(number)
        )
        await self._stub.RuntimeCheckDeviceUnused(request, timeout=UNUSED_TIMEOUT_S)


class Deferral:
    """Answers the flagged calls of a driver that defers by itself."""

    def __init__(
        self, driver: CsiDriver, runtime: RuntimeClient, *, report_condition: bool
    ) -> None:
        self._driver = driver
        self._runtime = runtime
        self._report_condition = report_condition

    def methods(self) -> Methods:
        """The calls that may be flagged, for a shim that wraps nothing; all others pass."""
        return csi_methods(
            "Node",
            {
                "NodePublishVolume": self._pass_publish,
                "NodeGetVolumeStats": self._stats_or_pass,
                "NodeExpandVolume": self._expand_or_pass,
            },
        )

    async def _pass_publish(
        self, request: csi_pb2.NodePublishVolumeRequest, data: bytes, call: Call
    ) -> bytes:
        if request.defer_fs_ops:
            await self._driver.check_defers(call.time_remaining())
        return await self._driver.port.forward(call, data)

    async def _stats_or_pass(
        self, request: csi_pb2.NodeGetVolumeStatsRequest, data: bytes, call: Call
    ) -> bytes:
        if not request.defer_fs_ops:
            return await self._driver.port.forward(call, data)
        return await self.stats(request)

    async def _expand_or_pass(
        self, request: csi_pb2.NodeExpandVolumeRequest, data: bytes, call: Call
    ) -> bytes:
        if not request.defer_fs_ops:
            return await self._driver.port.forward(call, data)
        return await self.expand(request, call)

    async def stats(self, request: csi_pb2.NodeGetVolumeStatsRequest) -> bytes:
        """The answer: statistics from the kernel that has the volume mounted."""
        csi.volume_id_of_any_driver(request.volume_id)
        target = volumes.TargetPath.parse(request.volume_path, role="volume_path")
        response = csi.stats_to_wire(await self._runtime.stats(target.text))
        if not self._report_condition:
            response.ClearField("volume_condition")
        return response.SerializeToString()

    async def expand(self, request: csi_pb2.NodeExpandVolumeRequest, call: Call) -> bytes:
        """Let the driver grow the device, then the runtime the filesystem; returns the answer. Idempotent."""
        target = volumes.TargetPath.parse(request.volume_path, role="volume_path")
        capacity = csi.capacity_range(request.capacity_range)
        response = await self._driver.node.NodeExpandVolume(request, **call.onward())
        capacity = volumes.CapacityRange(
            max(capacity.required_bytes, response.capacity_bytes), capacity.limit_bytes
        )
        capacity_bytes = await self._runtime.expand(target.text, capacity, call.time_remaining())
        return csi_pb2.NodeExpandVolumeResponse(capacity_bytes=capacity_bytes).SerializeToString()
