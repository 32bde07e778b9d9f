"""The guests that have this driver's deferred volumes, reached through the proxy's Runtime API by target path.

The driver never calls a runtime: the proxy knows which handler has a target, and calls it. Without a Runtime API
(`runtime_socket` is empty) a deferred volume is unreachable, and the driver refuses a call that needs its guest: it
never assumes that a guest was frozen, or that it applied a limit.

An error is the proxy's own, with its code, and `PeerUnavailable` while the proxy or the handler is absent: then the
guest's state is unknown; a guest may have the volume.
"""

from collections.abc import Callable

from crust.core import errors, volumes
from crust.rpc import channel
from crust.rpc.messages import crust_v1
from crust.rpc.port import Port, SocketPort, stub
from crust.wire.v1 import runtime_pb2, runtime_pb2_grpc

FREEZE_TIMEOUT_S = 60.0
"""A guest writes back its page cache before its filesystem is frozen."""
THAW_TIMEOUT_S = 20.0
LIMITS_TIMEOUT_S = 30.0


class Guests:
    """Calls to the guest that has a volume. A target that is not deferred is `NotFound`.

    Connects to `socket_path` at the first call, until `close`. Raises the errors of `channel.target_of`. Without a
    path every call raises NoRuntimeSocket.
    """

    def __init__(self, socket_path: str = "", connect: Callable[[str], Port] = SocketPort) -> None:
        if socket_path:
            channel.target_of(socket_path)  # an invalid path is refused at the start
        self._connect = connect
        self._socket_path = socket_path
        self._port: Port | None = None

    def check_reachable(self) -> None:
        """Raise NoRuntimeSocket if no guest can ever be reached; makes no call."""
        if not self._socket_path:
            raise errors.NotReady.named(
                "NoRuntimeSocket",
                "the guest that has the volume cannot be reached",
                why="the driver was started without runtime_socket",
            )

    async def freeze(self, target: volumes.TargetPath, thaw_after_s: int) -> bool:
        """Freeze for at most `thaw_after_s` (1 to 60); whether a guest has the filesystem.

        False: no sandbox has the volume, so it has no writers now. A repeated call restarts the time.
        """
        request = runtime_pb2.RuntimeFreezeVolumeRequest(
            volume_target_path=target.text, thaw_after_seconds=thaw_after_s
        )
        answer = await self._proxy().RuntimeFreezeVolume(request, timeout=FREEZE_TIMEOUT_S)
        return answer.frozen

    async def thaw(self, target: volumes.TargetPath) -> bool:
        """Thaw; whether it was frozen until now. Not frozen is a success, and False."""
        request = runtime_pb2.RuntimeThawVolumeRequest(volume_target_path=target.text)
        answer = await self._proxy().RuntimeThawVolume(request, timeout=THAW_TIMEOUT_S)
        return answer.was_frozen

    async def set_limits(self, target: volumes.TargetPath, limits: volumes.IoLimits) -> bool:
        """Replace the limits, also for a later sandbox; whether a sandbox has the volume and applied them."""
        request = runtime_pb2.RuntimeSetVolumeLimitsRequest(
            volume_target_path=target.text, limits=crust_v1.io_limits_to_wire(limits)
        )
        answer = await self._proxy().RuntimeSetVolumeLimits(request, timeout=LIMITS_TIMEOUT_S)
        return answer.applied

    async def close(self) -> None:
        if self._port is not None:
            await self._port.aclose()
            self._port = None

    def _proxy(self) -> "runtime_pb2_grpc.RuntimeAsyncStub":
        self.check_reachable()
        if self._port is None:
            self._port = self._connect(self._socket_path)
        return stub(runtime_pb2_grpc.RuntimeStub, self._port, raises_errors=True)
