"""The shim in front of any driver: which calls are about a deferred volume, and who answers them.

A driver that defers by itself keeps its deferral: its flagged calls go to `Deferral`. Any other driver is wrapped.
Which of the two it is, is asked once per connection, because it may be replaced by another version; a volume that was
wrapped stays so until it is unpublished and unstaged, which its private directories show. All other calls pass
through as bytes.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import grpc.aio
from google.protobuf.message import Message

from crust import deferral_keys, operations, volumes
from crust.csi_shim import admission, advertised, private_directories, version
from crust.csi_shim.deferral import Deferral
from crust.csi_shim.private_paths import PrivatePaths
from crust.csi_shim.staging import Staging, Volume
from crust.csi_shim.wrapped import WrappedVolumes
from crust.host.process import workers
from crust.host.process.bounded_calls import BoundedCalls
from crust.host.process.workers import Workers
from crust.rpc import extensions, passthrough, requests
from crust.rpc.driver_facts import DriverFacts, NodeCapabilities, node_capabilities
from crust.wire.csi.v1 import csi_pb2

_NODE = "/csi.v1.Node/"
_LOOK_S = 10.0
"""For a look at a volume's directories, which takes microseconds unless a mount there hangs."""

_OPERATION_S = 120.0
"""After this, callers are told that an operation is overdue: as long as a kubelet waits."""

_INSPECTED = (
    "NodeGetCapabilities",
    "NodeStageVolume",
    "NodeUnstageVolume",
    "NodePublishVolume",
    "NodeUnpublishVolume",
    "NodeGetVolumeStats",
    "NodeExpandVolume",
    "NodeGetVolumeHealth",
)
T = TypeVar("T")
Request = TypeVar("Request", bound=Message)
Answer = Callable[[Request, bytes, passthrough.Context], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Wrapping:
    """What the operator decides: the kubelet's root, and who decides for volumes whose context says nothing."""

    kubelet_root: str
    default: deferral_keys.Defer = deferral_keys.Defer.NEVER


class Frontend:
    """Answers the Node service's calls on one driver's socket."""

    def __init__(
        self,
        driver: grpc.aio.Channel,
        facts: DriverFacts,
        deferral: Deferral,
        wrapped: WrappedVolumes,
        staging: Staging,
        wrapping: Wrapping,
    ) -> None:
        self._driver = driver
        self._facts = facts
        self._deferral = deferral
        self._wrapped = wrapped
        self._staging = staging
        self._wrapping = wrapping
        self._operations = operations.KeyedOperations(Workers("the shim", limit=64))
        self._looks = BoundedCalls(limit=32)
        self._knows_volumes: bool | None = None
        """What a look for volumes has found since the last operation, which may have made or removed one."""
        self._ended = 0
        """How many operations have ended."""
        self._advertised = advertised.Advertised(facts, self._has_volumes)
        self._forward = {name: passthrough.forward(driver, _NODE + name) for name in _INSPECTED}

    async def drain(self) -> None:
        """Refuse new operations, and wait for the running ones."""
        await self._operations.drain()

    async def idle(self) -> None:
        """Wait until no operation runs."""
        await self._operations.idle()

    @staticmethod
    def holds(method: str) -> bool:
        """Whether a call may be about a wrapped volume; any other one passes whichever process answers."""
        name = method.removeprefix(_NODE)
        return method.startswith(_NODE) and name in _INSPECTED and "Volume" in name

    def handler(self) -> passthrough.Passthrough:
        """The generic handler for the server."""
        own = {
            "NodeGetCapabilities": _parsed(
                csi_pb2.NodeGetCapabilitiesRequest, self._get_capabilities
            ),
            "NodeStageVolume": _parsed(csi_pb2.NodeStageVolumeRequest, self._stage),
            "NodeUnstageVolume": _parsed(csi_pb2.NodeUnstageVolumeRequest, self._unstage),
            "NodePublishVolume": _parsed(csi_pb2.NodePublishVolumeRequest, self._publish),
            "NodeUnpublishVolume": _parsed(csi_pb2.NodeUnpublishVolumeRequest, self._unpublish),
            "NodeGetVolumeStats": _parsed(csi_pb2.NodeGetVolumeStatsRequest, self._stats),
            "NodeExpandVolume": _parsed(csi_pb2.NodeExpandVolumeRequest, self._expand),
            "NodeGetVolumeHealth": _parsed(csi_pb2.NodeGetVolumeHealthRequest, self._health),
        }
        calls = {_NODE + name: each for name, each in own.items()}
        calls[version.PROBE] = version.telling(passthrough.forward(self._driver, version.PROBE))
        return passthrough.Passthrough(self._driver, calls)

    async def _get_capabilities(
        self, _: csi_pb2.NodeGetCapabilitiesRequest, data: bytes, context: passthrough.Context
    ) -> bytes:
        answered = await self._forward["NodeGetCapabilities"](data, context)
        if (await self._capabilities(context)).defers:
            return answered
        answer = requests.parse(csi_pb2.NodeGetCapabilitiesResponse, answered)
        known = node_capabilities(answer).numbers
        own = await self._advertised.beside(
            known,
            opted_in=extensions.deferral_requested(context),
            left_s=context.time_remaining(),
        )
        for number in own:
            answer.capabilities.add().rpc.type = number
        return answer.SerializeToString()

    async def _stage(
        self, request: csi_pb2.NodeStageVolumeRequest, data: bytes, context: passthrough.Context
    ) -> bytes:
        if not (request.volume_capability.HasField("mount") and request.staging_target_path):
            return await self._pass("NodeStageVolume", request.volume_id, data, context)
        volume = await self._volume(request.volume_id, context)
        wants_block = await self._wants_block(request, context)
        is_staged = await self._finds(volume, private_directories.is_staged)
        if not is_staged and wants_block:
            path = request.staging_target_path
            wants_block = not await self._look(volume, _is_mounted, path)
        if not (is_staged or wants_block):
            answered = await self._pass("NodeStageVolume", request.volume_id, data, context)
            self._staging.remember(volume.paths.key, request)
            return answered

        async def work() -> None:
            in_use = await workers.run(private_directories.is_in_use, volume.paths)
            if wants_block or in_use:
                await self._staging.stage_as_block(volume, request)
            else:
                await self._staging.stage_as_mount(volume, request)

        await self._run(volume, request, context, work)
        return csi_pb2.NodeStageVolumeResponse().SerializeToString()

    async def _wants_block(
        self, request: csi_pb2.NodeStageVolumeRequest, context: passthrough.Context
    ) -> bool:
        """Whether the volume is staged as block: it is deferred, or its publish decides."""
        said = deferral_keys.defer(request.volume_context)
        in_guest = deferral_keys.formats_in_guest(request.volume_context)
        if (said or self._wrapping.default) is deferral_keys.Defer.NEVER and not in_guest:
            return False
        if (await self._capabilities(context)).defers:
            return False
        try:
            admission.check_stage(await self._facts.name(), request)
        except admission.CannotBeDeferred:
            if said is deferral_keys.Defer.ALWAYS or in_guest:
                raise
            return False  # for the host; a deferred publish is refused with this reason
        return True

    async def _unstage(
        self, request: csi_pb2.NodeUnstageVolumeRequest, data: bytes, context: passthrough.Context
    ) -> bytes:
        volume = await self._volume(request.volume_id, context)
        if not await self._finds(volume, private_directories.is_staged):
            answered = await self._pass("NodeUnstageVolume", request.volume_id, data, context)
            self._staging.forget(volume.paths.key)
            return answered
        path = request.staging_target_path
        await self._run(volume, request, context, lambda: self._staging.unstage(volume, path))
        return csi_pb2.NodeUnstageVolumeResponse().SerializeToString()

    async def _publish(
        self, request: csi_pb2.NodePublishVolumeRequest, data: bytes, context: passthrough.Context
    ) -> bytes:
        if not request.defer_fs_ops:
            return await self._host_publish(request, data, context)
        volume = await self._volume(request.volume_id, context)
        if await self._defers_itself(volume, context):
            return (await self._deferral.publish(request, context)).SerializeToString()
        response = await self._run(
            volume, request, context, lambda: self._wrapped.publish(volume, request)
        )
        return response.SerializeToString()

    async def _host_publish(
        self, request: csi_pb2.NodePublishVolumeRequest, data: bytes, context: passthrough.Context
    ) -> bytes:
        deferral_keys.check_host_publish(
            request.volume_id,
            request.volume_context,
            is_block=request.volume_capability.HasField("block"),
        )
        volume = await self._volume(request.volume_id, context)
        self._staging.published_on_host(volume.paths.key, request.target_path)
        if not request.volume_capability.HasField("mount"):
            return await self._pass("NodePublishVolume", request.volume_id, data, context)
        if not await self._finds(volume, private_directories.is_staged):
            return await self._pass("NodePublishVolume", request.volume_id, data, context)
        response = await self._run(
            volume, request, context, lambda: self._wrapped.publish_on_host(volume, request)
        )
        return response.SerializeToString()

    async def _unpublish(
        self, request: csi_pb2.NodeUnpublishVolumeRequest, data: bytes, context: passthrough.Context
    ) -> bytes:
        volume = await self._volume(request.volume_id, context)
        if await self._finds(volume, _is_private, request.target_path, request.defer_fs_ops):
            target = request.target_path
            await self._run(
                volume, request, context, lambda: self._wrapped.unpublish(volume, target)
            )
            return csi_pb2.NodeUnpublishVolumeResponse().SerializeToString()
        if request.defer_fs_ops and not (await self._capabilities(context)).defers:
            request.ClearField(
                "defer_fs_ops"
            )  # of a volume that the driver's older version deferred
            data = request.SerializeToString()
        answered = await self._pass("NodeUnpublishVolume", request.volume_id, data, context)
        self._staging.unpublished_on_host(volume.paths.key, request.target_path)
        return answered

    async def _stats(
        self, request: csi_pb2.NodeGetVolumeStatsRequest, data: bytes, context: passthrough.Context
    ) -> bytes:
        if not request.defer_fs_ops:
            volume = await self._volume(request.volume_id, context)
            path = request.volume_path
            if not await self._finds(volume, private_directories.has_leaf, path):
                return await self._pass("NodeGetVolumeStats", None, data, context)
        return (await self._deferral.stats(request)).SerializeToString()

    async def _expand(
        self, request: csi_pb2.NodeExpandVolumeRequest, data: bytes, context: passthrough.Context
    ) -> bytes:
        volume = await self._volume(request.volume_id, context)
        if request.defer_fs_ops and await self._defers_itself(volume, context):
            return (await self._deferral.expand(request, context)).SerializeToString()
        is_staged = await self._finds(volume, private_directories.is_staged)
        expands = (await self._capabilities(context)).expands
        if not (request.defer_fs_ops or is_staged):
            known = (await self._capabilities(context)).numbers
            if expands or not await self._advertised.expands(known, context.time_remaining()):
                return await self._pass("NodeExpandVolume", request.volume_id, data, context)
            path = advertised.path_of(request)
            if not await self._look(volume, advertised.is_there, path):
                raise advertised.NoVolumeAt(request.volume_id, path)
            # the CO calls because of the shim: by its capabilities, the driver needs nothing of a node
            size = request.capacity_range.required_bytes
            return csi_pb2.NodeExpandVolumeResponse(capacity_bytes=size).SerializeToString()

        async def work() -> int:
            if request.defer_fs_ops:
                return await self._wrapped.expand(volume, request, driver_expands=expands)
            if not expands:
                return request.capacity_range.required_bytes
            return await self._wrapped.expand_staged(volume, request)

        size = await self._run(volume, request, context, work)
        return csi_pb2.NodeExpandVolumeResponse(capacity_bytes=size).SerializeToString()

    async def _health(
        self, request: csi_pb2.NodeGetVolumeHealthRequest, data: bytes, context: passthrough.Context
    ) -> bytes:
        """The driver is asked, with the paths that it knows; the proxy adds what the guest reports."""
        volume = await self._volume(request.volume_id, context)
        target = request.volume_publish_path
        if await self._finds(volume, private_directories.has_leaf, target):
            request.volume_publish_path = volume.paths.leaf(target)
            if volume.stages:
                request.staging_target_path = volume.paths.staging
            data = request.SerializeToString()
        return await self._pass("NodeGetVolumeHealth", None, data, context)

    async def _defers_itself(self, volume: Volume, context: passthrough.Context) -> bool:
        """Whether a flagged call goes to the driver's own deferral, and not to what an older version left wrapped."""
        if not (await self._capabilities(context)).defers:
            return False
        return not await self._finds(volume, _is_wrapped)

    async def _has_volumes(self) -> bool:
        """Whether there are deferred volumes: then the shim advertises what it answers for them.

        A kubelet asks before each call. Only operations make and remove volumes' directories, so a look is repeated
        after one, and for as long as one runs.
        """
        if self._knows_volumes is not None:
            return self._knows_volumes
        root = self._wrapping.kubelet_root
        look = partial(private_directories.has_volumes, root)
        ended = self._ended
        found = await self._looks.call(root, look, timeout_s=_LOOK_S, fresh=True)
        if ended == self._ended and not self._operations.running():
            self._knows_volumes = found
        return found

    async def _finds(self, volume: Volume, function: Callable[..., bool], *args: object) -> bool:
        """A look for a directory of the volume. Of most volumes there is none, and no thread is asked for that."""
        if private_directories.are_known_absent(volume.paths):
            return False
        return await self._look(volume, function, *args)

    async def _look(self, volume: Volume, function: Callable[..., bool], *args: object) -> bool:
        """A look at a volume's directories that is no part of an operation: one at a time, or retries add threads."""
        return await self._looks.call(
            (function, volume.paths, args),
            partial(function, volume.paths, *args),
            timeout_s=_LOOK_S,
            shown=f"volume {volume.paths.key}",
            fresh=True,
        )

    async def _volume(self, volume_id: str, context: passthrough.Context) -> Volume:
        name = await self._facts.name(context.time_remaining())
        key = volumes.VolumeKey(name, volumes.VolumeId(volume_id))
        paths = PrivatePaths.of(self._wrapping.kubelet_root, key)
        stages = (await self._capabilities(context)).stages
        return Volume(paths, stages, passthrough.metadata_of(context))

    async def _capabilities(self, context: passthrough.Context) -> NodeCapabilities:
        return await self._facts.node_capabilities(context.time_remaining())

    async def _run(
        self,
        volume: Volume,
        request: Message,
        context: passthrough.Context,
        work: Callable[[], Awaitable[T]],
    ) -> T:
        name = type(request).__name__.removesuffix("Request")

        async def noted() -> T:
            self._knows_volumes = None
            try:
                return await work()
            finally:
                self._ended += 1

        return await self._operations.run(
            volume.paths.key.volume_id,
            name,
            requests.identity(request),
            noted,
            limit_s=_OPERATION_S,
            left_s=context.time_remaining(),
        )

    async def _pass(
        self, name: str, volume_id: str | None, data: bytes, context: passthrough.Context
    ) -> bytes:
        if not volume_id:
            return await self._forward[name](data, context)
        with self._operations.shared(volume_id):
            return await self._forward[name](data, context)


def _is_mounted(_: PrivatePaths, path: str) -> bool:
    """Whether the volume is mounted at the CO's path."""
    return private_directories.is_mounted(path)


def _is_private(paths: PrivatePaths, target: str, is_deferred: bool) -> bool:  # noqa: FBT001 - by position
    """Whether the target is published at a leaf, or may be."""
    if private_directories.has_leaf(paths, target):
        return True
    if private_directories.is_staged(paths):
        return True
    return is_deferred and private_directories.has_publishes(paths)


def _is_wrapped(paths: PrivatePaths) -> bool:
    return private_directories.is_staged(paths) or private_directories.has_publishes(paths)


def _parsed(kind: type[Request], answer: Answer[Request]) -> passthrough.UnaryBehaviour:
    async def behave(data: bytes, context: passthrough.Context) -> bytes:
        try:
            return await answer(requests.parse(kind, data), data, context)
        except grpc.aio.AioRpcError as error:
            return await passthrough.relay_status(context, error)

    return behave
