"""The shim as a library: wraps a Node servicer in this process.

A driver author wraps the Node servicer of a grpc.aio server, and registers the result instead:

    async with library.connect("/run/crust/runtime.sock") as proxy:
        node = library.wrap(MyNode(), library.RuntimeClient(proxy))

`MyNode` answers a publish with `defer_fs_ops` by a `DeferredMount` (specs/deferral.md): `identify_device` has its
device's identity. It advertises DEFER_FS_OPS where `deferral_requested` says that the caller knows it.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar, cast

from crust import errors
from crust.csi_shim.deferral import Context, Deferral
from crust.csi_shim.runtime_client import RuntimeClient
from crust.host.block.devices import identify as identify_device
from crust.rpc import status
from crust.rpc.channel import connect
from crust.rpc.driver_facts import advertises_deferral
from crust.rpc.extensions import deferral_requested
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

__all__ = ["RuntimeClient", "connect", "deferral_requested", "identify_device", "wrap"]

Answer = TypeVar("Answer")


class _Servicer:
    """Adapts a servicer to `deferral.InnerNode`."""

    def __init__(self, node: csi_pb2_grpc.NodeServicer) -> None:
        self._node: Any = node

    async def publish(
        self, request: csi_pb2.NodePublishVolumeRequest, context: Context
    ) -> csi_pb2.NodePublishVolumeResponse:
        return cast(
            "csi_pb2.NodePublishVolumeResponse",
            await self._node.NodePublishVolume(request, context),
        )

    async def unpublish(
        self, request: csi_pb2.NodeUnpublishVolumeRequest, context: Context, timeout_s: float
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        async with asyncio.timeout(timeout_s):
            return cast(
                "csi_pb2.NodeUnpublishVolumeResponse",
                await self._node.NodeUnpublishVolume(request, context),
            )

    async def expand(
        self, request: csi_pb2.NodeExpandVolumeRequest, context: Context
    ) -> csi_pb2.NodeExpandVolumeResponse:
        return cast(
            "csi_pb2.NodeExpandVolumeResponse", await self._node.NodeExpandVolume(request, context)
        )

    async def defers(self, context: Context) -> bool:
        request = csi_pb2.NodeGetCapabilitiesRequest()
        return advertises_deferral(await self._node.NodeGetCapabilities(request, context))


class _Wrapped(csi_pb2_grpc.NodeServicer):
    """The inner servicer, except for the three calls that may be flagged."""

    def __init__(self, inner: csi_pb2_grpc.NodeServicer, deferral: Deferral) -> None:
        self._inner: Any = inner
        self._deferral = deferral
        for method in csi_pb2.DESCRIPTOR.services_by_name["Node"].methods:
            if method.name not in vars(_Wrapped) and hasattr(inner, method.name):
                setattr(self, method.name, getattr(inner, method.name))

    async def NodePublishVolume(self, request: Any, context: Any) -> Any:
        if request.defer_fs_ops:
            return await _answered(context, self._deferral.publish(request, context))
        return await self._inner.NodePublishVolume(request, context)

    async def NodeGetVolumeStats(self, request: Any, context: Any) -> Any:
        if request.defer_fs_ops:
            return await _answered(context, self._deferral.stats(request))
        return await self._inner.NodeGetVolumeStats(request, context)

    async def NodeExpandVolume(self, request: Any, context: Any) -> Any:
        if request.defer_fs_ops:
            return await _answered(context, self._deferral.expand(request, context))
        return await self._inner.NodeExpandVolume(request, context)


async def _answered(context: Context, answer: Awaitable[Answer]) -> Answer:
    """Map crust's errors to statuses here: the driver's own server does not know them."""
    try:
        return await answer
    except errors.CrustError as error:
        return await status.abort(context, error, is_csi=True)


def wrap(
    node: csi_pb2_grpc.NodeServicer, runtime: RuntimeClient, *, report_condition: bool = True
) -> csi_pb2_grpc.NodeServicer:
    """A servicer that answers flagged calls itself and passes all others to `node`.

    `node` must advertise DEFER_FS_OPS to a caller that sends `crust-extensions: deferral`. With
    `report_condition` the statistics carry the volume condition of CSI 1.12.
    """
    # its constructor sets the methods that mypy misses
    return _Wrapped(  # type: ignore[abstract]
        node, Deferral(_Servicer(node), runtime, report_condition=report_condition)
    )
