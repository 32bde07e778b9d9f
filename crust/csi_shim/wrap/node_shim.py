"""The shim in front of any driver: it finds the calls about deferred volumes, and answers them or passes them on.

A driver that defers by itself keeps its deferral: its flagged calls go to `Deferral`. Any other driver is wrapped.
The shim asks the driver once per connection, because another version may replace it; a wrapped volume stays wrapped
until it is unpublished and unstaged, which its private directories show. All other calls pass through as bytes.

Beside the driver's capabilities the shim advertises the capabilities that a CO needs for the shim's own calls:

- GET_VOLUME_STATS and EXPAND_VOLUME while a deferred volume is on the node. For other volumes the driver answers as
  without the shim. If the driver has both, the shim does not look for volumes: a kubelet asks before each call.
- EXPAND_VOLUME always, if the plugin says that its volumes can be expanded and its node needs nothing for it: the
  controller's shim requires the node's part for every mounted volume, because it cannot know the deferred ones.
  A kubelet asks before the first publish too, when the node has nothing of the volume.
- Deferral, to a caller that opts in.

It does not advertise VOLUME_MOUNT_GROUP, which would end the kubelet's own fsGroup for all volumes of the driver.
"""

import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

from google.protobuf.message import Message

from crust.core import deferral_keys, errors, volumes
from crust.core.operations import KeyedOperations
from crust.csi_shim.deferral import Deferral
from crust.csi_shim.wrap import admission, as_block, leaves, private_directories
from crust.csi_shim.wrap.private_directories import PrivatePaths
from crust.csi_shim.wrap.staging import StagedForMount, Volume
from crust.csi_shim.wrap.wrapped import WrappedVolumes
from crust.host.process import workers
from crust.rpc.call import Call, identity_of
from crust.rpc.csi_driver import CsiDriver, numbers_in
from crust.rpc.messages import csi, extensions
from crust.rpc.port import decoded
from crust.rpc.serving.service import Methods, csi_methods
from crust.wire.csi.v1 import csi_pb2

T = TypeVar("T")

_LOOK_S = 10.0
"""For a look at a volume's directories, which takes microseconds unless a mount there hangs."""

_OPERATION_S = 120.0
"""After this time an operation is overdue: as long as a kubelet waits."""

_RPC = csi_pb2.NodeServiceCapability.RPC
_Number: TypeAlias = "csi_pb2.NodeServiceCapability.RPC.Type.ValueType"
_DEFERRAL = (
    _RPC.DEFER_FS_OPS,
    _RPC.DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP,
    _RPC.DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP_CHANGE_POLICY,
)


@dataclass(frozen=True, slots=True)
class Wrapping:
    """The operator's settings."""

    kubelet_root: str
    driver_name: str = ""
    """The driver's name for the CO; empty: its answer to the first question."""


class NodeShim:
    """Answers the Node service's calls on one driver's socket.

    A change of a volume is an operation, one at a time per volume, which outlives its caller. A look at the volume's
    directories is no operation: each question has one thread, so that retries add no thread if a mount hangs.
    """

    def __init__(
        self,
        driver: CsiDriver,
        deferral: Deferral,
        wrapped: WrappedVolumes,
        wrapping: Wrapping,
        operations: KeyedOperations,
    ) -> None:
        self._driver = driver
        self._deferral = deferral
        self._wrapped = wrapped
        self._staging = wrapped.staging
        self._wrapping = wrapping
        self._operations = operations
        """By volume id."""
        self._driver_name = wrapping.driver_name

    def methods(self) -> Methods:
        """The methods that are looked at; all others pass."""
        return csi_methods(
            "Node",
            {
                "NodeGetCapabilities": self._get_capabilities,
                "NodeStageVolume": self._stage,
                "NodeUnstageVolume": self._unstage,
                "NodePublishVolume": self._publish,
                "NodeUnpublishVolume": self._unpublish,
                "NodeGetVolumeStats": self._stats,
                "NodeExpandVolume": self._expand,
                "NodeGetVolumeHealth": self._health,
            },
        )

    async def _get_capabilities(
        self, _: csi_pb2.NodeGetCapabilitiesRequest, data: bytes, call: Call
    ) -> bytes:
        answer_bytes = await self._driver.port.forward(call, data)
        if _RPC.DEFER_FS_OPS in await self._capabilities(call):
            return answer_bytes
        read = csi_pb2.NodeGetCapabilitiesResponse.FromString
        answer = decoded(read, answer_bytes, call.method)
        advertised, added = numbers_in(answer), list[_Number]()
        if _RPC.GET_VOLUME_STATS not in advertised and await self._has_volumes():
            added.append(_RPC.GET_VOLUME_STATS)
        if _RPC.EXPAND_VOLUME not in advertised and await self._advertises_expansion(call):
            added.append(_RPC.EXPAND_VOLUME)
        if extensions.requested(call.metadata, extensions.DEFERRAL):
            added.extend(number for number in _DEFERRAL if number not in advertised)
        for number in added:
            answer.capabilities.add().rpc.type = number
        return answer.SerializeToString()

    async def _advertises_expansion(self, call: Call) -> bool:
        """Whether the driver or the shim advertises EXPAND_VOLUME."""
        if _RPC.EXPAND_VOLUME in await self._capabilities(call):
            return True
        if await self._has_volumes():
            return True
        return await self._driver.expands_volumes(call.time_remaining())

    async def _stage(
        self, request: csi_pb2.NodeStageVolumeRequest, data: bytes, call: Call
    ) -> bytes:
        if not (request.volume_capability.HasField("mount") and request.staging_target_path):
            return await self._stage_raw(request, data, call)
        volume = await self._volume(request.volume_id, call)
        wants_block = await self._wants_block(request, call)
        is_staged = await self._is_staged(volume)
        if not is_staged and wants_block:
            path = request.staging_target_path
            wants_block = not await self._look(volume, private_directories.is_mounted, path)
        if not (is_staged or wants_block):
            answer_bytes = await self._pass(request.volume_id, data, call)
            self._staging.requests[volume.paths.key] = request
            return answer_bytes

        async def work() -> None:
            if wants_block or await workers.run(leaves.is_in_use, volume.paths):
                await self._staging.stage_as_block(volume, request)
            else:
                await self._staging.stage_as_asked(volume, request)

        await self._run(volume, request, call, work)
        return csi_pb2.NodeStageVolumeResponse().SerializeToString()

    async def _stage_raw(
        self, request: csi_pb2.NodeStageVolumeRequest, data: bytes, call: Call
    ) -> bytes:
        """Pass a raw block volume to the driver, unless it is staged for a deferred mount."""
        capability, path = request.volume_capability, request.staging_target_path
        volume = await self._volume(request.volume_id, call)
        is_raw = capability.HasField("block") and path
        if not (is_raw and await self._is_staged(volume)):
            return await self._pass(request.volume_id, data, call)
        await self._run(volume, request, call, lambda: self._staging.stage_raw(volume, request))
        return csi_pb2.NodeStageVolumeResponse().SerializeToString()

    async def _wants_block(self, request: csi_pb2.NodeStageVolumeRequest, call: Call) -> bool:
        """Whether the volume is staged as block: it is deferred, or its publish decides.

        The proxy decides. Without its decision, a volume that may be deferred is: a stage as block mounts nothing.
        """
        defer = deferral_keys.defer(request.volume_context)
        in_guest = deferral_keys.format_in(request.volume_context) != "host"
        is_block = extensions.is_staged_as_block(call.metadata)
        if is_block is None:
            is_block = deferral_keys.may_defer(request.volume_context)
        if not is_block:
            return False
        if _RPC.DEFER_FS_OPS in await self._capabilities(call):
            return False
        try:
            admission.check_stage(await self._name(call), request)
        except admission.CannotBeDeferred:
            if defer is deferral_keys.Defer.ALWAYS or in_guest:
                raise
            return False  # for the host; a deferred publish is refused with this reason
        return True

    async def _unstage(
        self, request: csi_pb2.NodeUnstageVolumeRequest, data: bytes, call: Call
    ) -> bytes:
        volume = await self._volume(request.volume_id, call)
        if not await self._is_staged(volume):
            answer_bytes = await self._pass(request.volume_id, data, call)
            self._staging.forget(volume.paths.key)
            return answer_bytes
        path = request.staging_target_path
        await self._run(volume, request, call, lambda: self._staging.unstage(volume, path))
        return csi_pb2.NodeUnstageVolumeResponse().SerializeToString()

    async def _publish(
        self, request: csi_pb2.NodePublishVolumeRequest, data: bytes, call: Call
    ) -> bytes:
        if not request.defer_fs_ops:
            return await self._host_publish(request, data, call)
        volume = await self._volume(request.volume_id, call)
        if await self._defers_itself(volume, call):
            return await self._driver.port.forward(call, data)
        response = await self._run(
            volume, request, call, lambda: self._wrapped.publish_deferred(volume, request)
        )
        return response.SerializeToString()

    async def _host_publish(
        self, request: csi_pb2.NodePublishVolumeRequest, data: bytes, call: Call
    ) -> bytes:
        format_in = deferral_keys.strictest_format_in(request.volume_context)
        is_block = request.volume_capability.HasField("block")
        deferral_keys.check_host_publish(request.volume_id, format_in, is_block=is_block)
        volume = await self._volume(request.volume_id, call)
        self._staging.on_host.add((volume.paths.key, request.target_path))
        if not await self._is_staged(volume):
            return await self._pass(request.volume_id, data, call)
        if not request.volume_capability.HasField("mount"):
            raise StagedForMount(volume.paths.key)
        response = await self._run(
            volume, request, call, lambda: self._wrapped.publish_on_host(volume, request)
        )
        return response.SerializeToString()

    async def _unpublish(
        self, request: csi_pb2.NodeUnpublishVolumeRequest, data: bytes, call: Call
    ) -> bytes:
        volume = await self._volume(request.volume_id, call)
        if await self._look(
            volume,
            private_directories.is_private,
            volume.paths,
            request.target_path,
            request.defer_fs_ops,
        ):
            target = request.target_path
            await self._run(volume, request, call, lambda: self._wrapped.unpublish(volume, target))
            return csi_pb2.NodeUnpublishVolumeResponse().SerializeToString()
        if request.defer_fs_ops and _RPC.DEFER_FS_OPS not in await self._capabilities(call):
            request.ClearField("defer_fs_ops")  # the driver's older version deferred the volume
            data = request.SerializeToString()
        answer_bytes = await self._pass(request.volume_id, data, call)
        self._staging.on_host.discard((volume.paths.key, request.target_path))
        return answer_bytes

    async def _stats(
        self, request: csi_pb2.NodeGetVolumeStatsRequest, data: bytes, call: Call
    ) -> bytes:
        if not request.defer_fs_ops:
            volume = await self._volume(request.volume_id, call)
            path = request.volume_path
            if not await self._look(volume, private_directories.has_leaf, volume.paths, path):
                return await self._pass(None, data, call)
        return await self._deferral.stats(request)

    async def _expand(
        self, request: csi_pb2.NodeExpandVolumeRequest, data: bytes, call: Call
    ) -> bytes:
        volume = await self._volume(request.volume_id, call)
        if request.defer_fs_ops and await self._defers_itself(volume, call):
            return await self._deferral.expand(request, call)
        is_staged = await self._is_staged(volume)
        expands = _RPC.EXPAND_VOLUME in await self._capabilities(call)
        if not (request.defer_fs_ops or is_staged):
            if expands or not await self._advertises_expansion(call):
                return await self._pass(request.volume_id, data, call)
            path = _checked_path(request)
            if not await self._look(volume, os.path.lexists, path):
                raise errors.NotFound.named(
                    "NoVolumeAt",
                    f"volume {request.volume_id[:128]} is not at {path}",
                    why="there is no such path on this node",
                )
            # the CO calls because of the shim: the driver's capabilities need no call at the node
            size = request.capacity_range.required_bytes
            return csi_pb2.NodeExpandVolumeResponse(capacity_bytes=size).SerializeToString()

        _checked_path(request)

        async def work() -> int:
            if request.defer_fs_ops:
                return await self._wrapped.expand(volume, request, driver_expands=expands)
            if not expands:
                return request.capacity_range.required_bytes
            return await self._wrapped.expand_staged(volume, request)

        size = await self._run(volume, request, call, work)
        return csi_pb2.NodeExpandVolumeResponse(capacity_bytes=size).SerializeToString()

    async def _health(
        self, request: csi_pb2.NodeGetVolumeHealthRequest, data: bytes, call: Call
    ) -> bytes:
        """The driver's answer, for the paths that it knows; the proxy adds the guest's condition."""
        volume = await self._volume(request.volume_id, call)
        target = request.volume_publish_path
        if await self._look(volume, private_directories.has_leaf, volume.paths, target):
            request.volume_publish_path = volume.paths.leaf(target)
            if volume.stages:
                request.staging_target_path = volume.paths.staging
            data = request.SerializeToString()
        return await self._pass(None, data, call)

    async def _run(
        self,
        volume: Volume,
        request: Message,
        call: Call,
        work: Callable[[], Coroutine[Any, Any, T]],
    ) -> T:
        return await self._operations.run(
            volume.paths.key.volume_id,
            type(request).__name__.removesuffix("Request"),
            identity_of(request),
            work,
            limit_s=_OPERATION_S,
            left_s=call.time_remaining(),
        )

    async def _look(self, volume: Volume, function: Callable[..., bool], *args: object) -> bool:
        return await self._operations.look(
            (function, args),
            partial(function, *args),
            timeout_s=_LOOK_S,
            shown=f"volume {volume.paths.key}",
            fresh=True,
        )

    async def _has_volumes(self) -> bool:
        root = self._wrapping.kubelet_root
        look = partial(private_directories.has_volumes, root)
        return await self._operations.look(root, look, timeout_s=_LOOK_S, fresh=True)

    async def _is_staged(self, volume: Volume) -> bool:
        return await self._look(volume, private_directories.is_staged, volume.paths)

    async def _defers_itself(self, volume: Volume, call: Call) -> bool:
        """Whether the driver defers, and has no wrapped volume of an older version there."""
        if _RPC.DEFER_FS_OPS not in await self._capabilities(call):
            return False
        return not await self._look(volume, private_directories.is_wrapped, volume.paths)

    async def _volume(self, volume_id: str, call: Call) -> Volume:
        key = volumes.VolumeKey(await self._name(call), volumes.VolumeId(volume_id))
        paths = PrivatePaths.of(self._wrapping.kubelet_root, key)
        stages = _RPC.STAGE_UNSTAGE_VOLUME in await self._capabilities(call)
        return Volume(paths, stages, as_block.onward(call.metadata))

    async def _name(self, call: Call) -> volumes.DriverName:
        """The driver's first name, for as long as the shim runs: the volumes' private paths depend on it."""
        if not self._driver_name:
            self._driver_name = await self._driver.name(call.time_remaining())
        return volumes.DriverName(self._driver_name)

    async def _capabilities(self, call: Call) -> frozenset[int]:
        return await self._driver.node_capabilities(call.time_remaining())

    async def _pass(self, volume_id: str | None, data: bytes, call: Call) -> bytes:
        if not volume_id:
            return await self._driver.port.forward(call, data)
        with self._operations.shared(volume_id):
            return await self._driver.port.forward(call, data)


def _checked_path(request: csi_pb2.NodeExpandVolumeRequest) -> str:
    csi.volume_id_of_any_driver(request.volume_id)
    return volumes.TargetPath.parse(request.volume_path, role="volume_path").text
