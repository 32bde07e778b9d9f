"""Deferred volumes of a driver without deferral: the driver publishes them as raw block devices at private paths.

A publish observes the leaf, decides as `leaves` says, and observes again. It calls the driver once: a second bind on
the same leaf would stack. An unpublish is repeated until nothing is mounted at the leaf. Each method is the work of
an operation: it outlives its caller, and the caller runs one per volume.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from crust.core import deferral_keys, errors, volumes
from crust.csi_shim.deferral import RuntimeClient
from crust.csi_shim.wrap import admission, as_block, leaves, private_directories, vendors
from crust.csi_shim.wrap.leaves import Kind, LeafUse
from crust.csi_shim.wrap.private_directories import DriverDidNotCleanUp
from crust.csi_shim.wrap.staging import Staging, Volume
from crust.host.process import workers
from crust.rpc import status
from crust.rpc.messages import csi
from crust.rpc.serving.service import as_crust_error
from crust.rpc.status import DriverOutcome, PeerStatus, Residue, Undo
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

_log = logging.getLogger(__name__)

_STACK_MAX = 8
"""The number of binds on one leaf that are removed, one by each unpublish."""


@dataclass(slots=True)
class _Attempt:
    """One publish: the state of the leaf before it, and the state of the driver's call."""

    volume: Volume
    request: csi_pb2.NodePublishVolumeRequest
    leaf: str
    before: LeafUse = LeafUse.BEGUN
    """The default is for a failed look: nothing is undone then."""
    mounts: int = 0
    """Before the publish."""
    outcome: DriverOutcome = DriverOutcome.NOT_CALLED


@dataclass(eq=False)
class WrappedVolumes:
    _node: "csi_pb2_grpc.NodeAsyncStub"
    staging: Staging
    _runtime: RuntimeClient

    async def publish_deferred(
        self, volume: Volume, request: csi_pb2.NodePublishVolumeRequest
    ) -> csi_pb2.NodePublishVolumeResponse:
        """Publish at the leaf. Raises a check's error or the driver's status, in a branch that D-36 allows."""
        attempt = _Attempt(volume, request, volume.paths.leaf(request.target_path))
        try:
            return await self._published(attempt)
        except Exception as error:
            crust_error = as_crust_error("NodePublishVolume", "the shim", error)
            residue = await self._undo(attempt)
            raise status.allowed_error("NodePublishVolume", crust_error, residue) from error

    async def _published(self, attempt: "_Attempt") -> csi_pb2.NodePublishVolumeResponse:
        key, request = attempt.volume.paths.key, attempt.request
        paths = attempt.volume.paths
        seen, is_block = await workers.run(
            lambda: (leaves.look(attempt.leaf), private_directories.is_block(paths))
        )
        attempt.before, attempt.mounts = leaves.use_of(seen), seen.mounts
        admitted = admission.admit(key.driver, request)
        secrets: Mapping[str, str] = {}
        if admitted.encryption is not None:
            staged = self.staging.requests.get(key)
            sources = (request.secrets, staged.secrets if staged is not None else {})
            passphrase = deferral_keys.passphrase(key.volume_id, *sources)
            secrets = {deferral_keys.PASSPHRASE: passphrase}
        if attempt.before is not LeafUse.DEVICE:
            await self._ask_driver(attempt, is_block=is_block)
        source, size = await workers.run(leaves.device, key, attempt.leaf, admitted.partition)
        mount = volumes.DeferredMount(
            source=source,
            fs_type=admitted.fs_type,
            mount_options=admitted.options,
            group=admitted.group,
            readonly=admitted.readonly,
            capacity_bytes=size,
            format=admitted.format,
            encryption=admitted.encryption,
            secrets=secrets,
        )
        wire = csi.deferred_mount_to_wire(mount)
        return csi_pb2.NodePublishVolumeResponse(deferred_mount=wire)

    async def _ask_driver(self, attempt: "_Attempt", *, is_block: bool) -> None:
        volume, request = attempt.volume, attempt.request
        await self.staging.ensure_block(volume, request, is_block=is_block)
        if attempt.before is LeafUse.OTHER:
            await self._take_down(volume, attempt.leaf, attempt.mounts)
            attempt.before = LeafUse.NEW
        await workers.run(leaves.prepare, volume.paths, attempt.leaf)
        attempt.outcome = DriverOutcome.SILENT
        try:
            rewritten = as_block.publish_request(request, volume.paths, staged=volume.stages)
            await self._node.NodePublishVolume(rewritten, **volume.onward)
        except PeerStatus as error:
            if status.is_final(error):
                attempt.outcome = DriverOutcome.REFUSED
            raise
        attempt.outcome = DriverOutcome.ANSWERED

    async def _undo(self, attempt: "_Attempt") -> Residue:
        """Undo a failed publish; returns what is left of it. The caller reports the publish's error."""
        volume, leaf = attempt.volume, attempt.leaf
        try:
            mounts = (await workers.run(leaves.look, leaf)).mounts
            todo = leaves.undo_plan(attempt.before, attempt.outcome, is_mounted=bool(mounts))
            if todo is Undo.UNPUBLISH:
                await self._take_down(volume, leaf, mounts)
            elif todo is Undo.REMOVE:
                await workers.run(leaves.remove, leaf)
            after = await workers.run(leaves.look, leaf)
        except Exception as failure:
            extra = {"volume": str(volume.paths.key), "leaf": leaf, "error": failure}
            _log.warning("failed publish not undone completely", extra=extra)
            return Residue.EXISTS
        return leaves.residue_of(attempt.before, attempt.outcome, after)

    async def publish_on_host(
        self, volume: Volume, request: csi_pb2.NodePublishVolumeRequest
    ) -> csi_pb2.NodePublishVolumeResponse:
        """An ordinary publish of a volume that is staged as block."""
        await self.staging.ensure_mount(volume, request)
        return await self._node.NodePublishVolume(request, **volume.onward)

    async def unpublish(self, volume: Volume, target: str) -> None:
        """NodeUnpublishVolume. Raises `DeviceInUse`, the driver's status, `DriverDidNotCleanUp`.

        The proxy says whether a process writes to the device: a shim in a driver's pod sees no processes.
        """
        leaf = volume.paths.leaf(target)
        seen = await workers.run(leaves.look, leaf)
        if seen.kind is Kind.DEVICE:
            await self._runtime.check_unused(seen.number)
        await self._take_down(volume, leaf, seen.mounts)

    async def _take_down(self, volume: Volume, leaf: str, mounts: int) -> None:
        """Unpublish until no mount is left: a driver removes one mount per call, and may answer an error."""
        request = as_block.unpublish_request(volume.paths, leaf)
        for _ in range(_STACK_MAX):
            refusal: PeerStatus | None = None
            try:
                await self._node.NodeUnpublishVolume(request, **volume.onward)
                remaining = await workers.run(leaves.release, leaf)
                if not remaining:
                    return
            except PeerStatus as error:
                refusal = error
                remaining = (await workers.run(leaves.look, leaf)).mounts
            if remaining >= mounts:
                raise refusal or DriverDidNotCleanUp(
                    "NodeUnpublishVolume", leaf, f"{remaining} mounts"
                )
            mounts = remaining
        raise DriverDidNotCleanUp("NodeUnpublishVolume", leaf, f"{mounts} mounts")

    async def expand(
        self, volume: Volume, request: csi_pb2.NodeExpandVolumeRequest, *, driver_expands: bool
    ) -> int:
        """First the device, by the driver, then the filesystem, by the runtime; returns the size. Idempotent."""
        target = volumes.TargetPath.parse(request.volume_path, role="volume_path")
        capacity = csi.capacity_range(request.capacity_range)
        leaf = volume.paths.leaf(target.text)
        if driver_expands:
            await self.expand_device(volume, request, leaf)
        size, is_encrypted = await workers.run(leaves.size_at, leaf)
        if is_encrypted:  # the header of the layer below takes a part of the size
            capacity = replace(capacity, required_bytes=min(capacity.required_bytes, size))
        return await self._runtime.expand(target.text, capacity, None)

    async def expand_staged(self, volume: Volume, request: csi_pb2.NodeExpandVolumeRequest) -> int:
        """Grow the device of a volume that is staged and not published, as a kubelet does before a pod starts.

        Drivers look for a published device, and some try to mount any other path. So the shim publishes the device
        for the call. The filesystem grows at the guest's mount.
        """
        staged = self.staging.requests.get(volume.paths.key)
        if staged is None:  # after a restart: the leaf's path at least names a block volume
            leaf = volume.paths.leaf(request.volume_path)
            try:
                return (await self.expand_device(volume, request, leaf)).capacity_bytes
            except PeerStatus as error:
                if not status.is_final(error):
                    raise
                raise errors.PeerUnavailable.named(
                    "NotStagedSinceRestart",
                    f"volume {volume.paths.key} cannot be expanded now",
                    why="the shim was started after it was staged, and cannot publish it for the "
                    f"driver, which says: {error.text}",
                ) from error
        leaf = volume.paths.leaf(staged.staging_target_path)
        try:
            # an interrupted expansion may have left it, and no guest has it
            if mounts := (await workers.run(leaves.look, leaf)).mounts:
                await self._take_down(volume, leaf, mounts)
            await workers.run(leaves.prepare, volume.paths, leaf)
            rewritten = as_block.publish_request(
                as_block.publish_of(staged), volume.paths, staged=volume.stages
            )
            await self._node.NodePublishVolume(rewritten, **volume.onward)
            return (await self.expand_device(volume, request, leaf)).capacity_bytes
        finally:
            await self._take_down(volume, leaf, (await workers.run(leaves.look, leaf)).mounts)

    async def expand_device(
        self, volume: Volume, request: csi_pb2.NodeExpandVolumeRequest, path: str
    ) -> csi_pb2.NodeExpandVolumeResponse:
        """NodeExpandVolume as block, unless the driver fails at it."""
        if not vendors.expands_at_node(volume.paths.key.driver):
            return csi_pb2.NodeExpandVolumeResponse(
                capacity_bytes=request.capacity_range.required_bytes
            )
        rewritten = as_block.expand_request(request, volume.paths, path, staged=volume.stages)
        return await self._node.NodeExpandVolume(rewritten, **volume.onward)
