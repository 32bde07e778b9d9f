"""The CSI calls of a kubelet: a connection per operation, and what each status means to it.

NodeGetCapabilities comes before most of them. If that fails, the kubelet treats the operation as finished without
effect, whatever the code: only the operation's own call can be "in progress".
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support.co import capability, publish_request, stage_request
from tests.support.kubelet.state import Pod, Volume

Code = grpc.StatusCode

NOT_FINAL = frozenset(
    {
        Code.CANCELLED,
        Code.DEADLINE_EXCEEDED,
        Code.UNAVAILABLE,
        Code.RESOURCE_EXHAUSTED,
        Code.ABORTED,
    }
)
"""csi_client.go isFinalError: the operation may be in progress. Every other code: it is for sure not."""


class OperationFailed(Exception):
    """A call failed. `is_final`: the kubelet concludes that nothing of the operation exists."""

    def __init__(self, method: str, code: grpc.StatusCode, details: str, *, is_final: bool) -> None:
        super().__init__(f"{method}: {code.name}: {details}")
        self.code = code
        self.is_final = is_final


class CapabilitiesUnknown(OperationFailed):
    """NodeGetCapabilities failed, so the operation's own call was not made."""


@dataclass(frozen=True)
class Answer:
    """One answered call. `path`: the target, or the staging path."""

    at_s: float
    method: str
    handle: str
    path: str
    code: grpc.StatusCode
    details: str

    @property
    def is_final(self) -> bool:
        """Whether the kubelet concludes that nothing exists."""
        return self.code not in NOT_FINAL and self.code is not Code.OK


class CsiClient:
    """Calls one socket. `heard` gets every answer but those of NodeGetCapabilities."""

    def __init__(
        self,
        socket: str,
        heard: Callable[[Answer], None],
        now_s: Callable[[], float],
        *,
        timeout_s: float = 120,
    ) -> None:
        self._socket = socket
        self._heard = heard
        self._now_s = now_s
        self.timeout_s = timeout_s

    async def stage(self, volume: Volume, staging: str) -> None:
        request = stage_request(
            volume.handle, staging, _capability(volume), volume_context=volume.context
        )
        await self._operate("NodeStageVolume", request, staging)

    async def unstage(self, handle: str, staging: str) -> None:
        request = csi_pb2.NodeUnstageVolumeRequest(volume_id=handle, staging_target_path=staging)
        await self._operate("NodeUnstageVolume", request, staging)

    async def publish(
        self, volume: Volume, pod: Pod, staging: str, target: str, token: str
    ) -> None:
        """NodePublishVolume, with the pod's information and, if the volume wants it, a token."""
        context = {
            **volume.context,
            "csi.storage.k8s.io/pod.name": pod.uid,
            "csi.storage.k8s.io/pod.uid": pod.uid,
        }
        if volume.republish:
            context["csi.storage.k8s.io/serviceAccount.tokens"] = token
        request = publish_request(
            volume.handle,
            target,
            _capability(volume),
            defer=False,
            staging=staging,
            readonly=volume.readonly,
            volume_context=context,
        )
        await self._operate("NodePublishVolume", request, target)

    async def unpublish(self, handle: str, target: str) -> None:
        """NodeUnpublishVolume; capabilities are not asked before it."""
        request = csi_pb2.NodeUnpublishVolumeRequest(volume_id=handle, target_path=target)
        async with self._connected() as stub:
            await self._call(stub, "NodeUnpublishVolume", request, target)

    async def expand(self, volume: Volume, staging: str, target: str, size_bytes: int) -> None:
        request = csi_pb2.NodeExpandVolumeRequest(
            volume_id=volume.handle,
            volume_path=target,
            staging_target_path=staging,
            capacity_range=csi_pb2.CapacityRange(required_bytes=size_bytes),
            volume_capability=_capability(volume),
        )
        await self._operate("NodeExpandVolume", request, target)

    async def stats(self, volume: Volume, target: str) -> None:
        request = csi_pb2.NodeGetVolumeStatsRequest(volume_id=volume.handle, volume_path=target)
        await self._operate("NodeGetVolumeStats", request, target)

    async def _operate(self, method: str, request: Any, path: str) -> None:
        async with self._connected() as stub:
            try:
                await stub.NodeGetCapabilities(
                    csi_pb2.NodeGetCapabilitiesRequest(), timeout=self.timeout_s
                )
            except grpc.aio.AioRpcError as error:
                raise CapabilitiesUnknown(
                    "NodeGetCapabilities", error.code(), error.details() or "", is_final=True
                ) from error
            await self._call(stub, method, request, path)

    async def _call(self, stub: Any, method: str, request: Any, path: str) -> None:
        code, details = Code.OK, ""
        try:
            await getattr(stub, method)(request, timeout=self.timeout_s)
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details() or ""
        answer = Answer(self._now_s(), method, request.volume_id, path, code, details)
        self._heard(answer)
        if code is not Code.OK:
            raise OperationFailed(method, code, details, is_final=answer.is_final)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Any]:
        async with channel.connect(self._socket) as connected:
            yield csi_pb2_grpc.NodeStub(connected)


def _capability(volume: Volume) -> csi_pb2.VolumeCapability:
    return capability(volume.fs_type)
