"""Stages volumes at the wrapped driver: as block at the private path, or as the CO asked; and changes between both.

A stage as block formats nothing and parses nothing foreign, so the shim begins with it if a publish decides. If the
publish decides otherwise, the driver unstages and stages again, for which the shim keeps the CO's NodeStageVolume,
with its secrets, in memory alone. A change is recorded until it has ended (docs/decisions/0020). If the driver
refuses to stage in the other way, no publish passes: each one stages the volume first.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from crust.core import errors, volumes
from crust.csi_shim.wrap import as_block, leaves, private_directories
from crust.csi_shim.wrap.private_directories import PrivatePaths
from crust.host.process import workers
from crust.rpc import status
from crust.rpc.messages import csi, redaction
from crust.rpc.serving.service import as_crust_error
from crust.rpc.status import PeerStatus, Residue
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

_log = logging.getLogger(__name__)


class StagedForMount(errors.Conflict):
    def __init__(self, key: volumes.VolumeKey) -> None:
        super().__init__(
            f"volume {key} is staged for a deferred mount",
            why="the request is for a raw block volume, and it cannot be both",
        )


@dataclass(frozen=True, slots=True)
class Volume:
    """The volume of a call, and whether its driver stages."""

    paths: PrivatePaths
    stages: bool
    onward: Mapping[str, Any]
    """The arguments of calls to its driver (`as_block.onward`)."""


class Staging:
    """Stages volumes at the wrapped driver. The caller runs one operation per volume."""

    def __init__(self, node: "csi_pb2_grpc.NodeAsyncStub") -> None:
        self._node = node
        self.requests: dict[volumes.VolumeKey, csi_pb2.NodeStageVolumeRequest] = {}
        """The CO's successful stage requests since the start."""
        self.on_host: set[tuple[volumes.VolumeKey, str]] = set()
        """Volume and target of publishes on the host that have begun: meanwhile the stage must stay."""

    def forget(self, key: volumes.VolumeKey) -> None:
        """Forget the volume, which is not staged any more."""
        self.requests.pop(key, None)
        self.on_host = {pair for pair in self.on_host if pair[0] != key}

    async def stage_as_block(self, volume: Volume, request: csi_pb2.NodeStageVolumeRequest) -> None:
        """NodeStageVolume as block, even if there is a record: after a reboot only the record is left."""
        paths, is_first, is_called = volume.paths, False, False
        try:
            is_first = await workers.run(
                private_directories.make_staging, paths, secrets=bool(request.secrets)
            )
            is_called = True
            await self._stage_block(volume, request)
        except Exception as error:
            crust_error = as_crust_error("NodeStageVolume", "the shim", error)
            is_refused = isinstance(crust_error, PeerStatus) and status.is_final(crust_error)
            residue = Residue.EXISTS
            # else the driver may still have an earlier stage: a kubelet must not forget it
            if is_first and (is_refused or not is_called):
                try:
                    await workers.run(private_directories.remove_staging, paths)
                    residue = Residue.NONE
                except Exception as failure:  # the CO unstages
                    _log.warning("private staging directory kept", extra={"error": failure})
            raise status.allowed_error("NodeStageVolume", crust_error, residue) from error

    async def _stage_block(self, volume: Volume, request: csi_pb2.NodeStageVolumeRequest) -> None:
        paths = volume.paths
        if await workers.run(private_directories.is_changing, paths):
            await self._unstage_at(volume, request.staging_target_path)
        await self._node.NodeStageVolume(as_block.stage_request(request, paths), **volume.onward)
        await workers.run(private_directories.end_change, paths)
        self.requests[paths.key] = request

    async def ensure_block(
        self, volume: Volume, request: csi_pb2.NodePublishVolumeRequest, *, is_block: bool
    ) -> None:
        """Before a deferred publish: stage the volume as block, unless it `is_block` already.

        Raises `StageForgotten`, `csi.StagingPathNotGiven`.
        """
        if not volume.stages:
            return
        # The driver would not refuse it: the driver gets a private staging path of the shim.
        if not request.staging_target_path:
            raise csi.StagingPathNotGiven()
        if is_block:
            return
        paths = volume.paths
        staged = await self._staged(paths, request, "as a block device for a deferred mount")
        await workers.run(self._check_not_on_host, paths.key)
        _log.info("staged again as block", extra={"volume": str(paths.key)})
        secrets = bool(staged.secrets)
        await workers.run(private_directories.begin_change, paths, secrets=secrets)
        await workers.run(private_directories.make_staging, paths, secrets=secrets)
        with _hiding_secrets(staged):
            await self._stage_block(volume, staged)

    async def _staged(
        self, paths: PrivatePaths, request: csi_pb2.NodePublishVolumeRequest, way: str
    ) -> csi_pb2.NodeStageVolumeRequest:
        """The CO's stage request, after a restart by its publish; `StageForgotten` if that may lack secrets."""
        staged = self.requests.get(paths.key)
        if staged is not None:
            return staged
        is_recorded = await workers.run(private_directories.is_staged, paths)
        if not is_recorded or await workers.run(private_directories.had_secrets, paths):
            raise errors.NotReady.named(
                "StageForgotten",
                f"volume {paths.key} cannot be staged again, {way}",
                why="the shim knows no stage of it: it is not staged, or the shim was started after the stage, "
                "which may have had secrets, and those are kept in memory only",
            )
        return as_block.stage_of(request)

    def _check_not_on_host(self, key: volumes.VolumeKey) -> None:
        """Raise `PublishedOnHost`. A shim that knows the stage has seen all publishes since."""
        for target in sorted(target for of, target in self.on_host.copy() if of == key):
            if private_directories.is_mounted(target):
                raise errors.NotReady.named(
                    "PublishedOnHost",
                    f"volume {key} cannot be deferred",
                    why=f"it is published on this host at {target}, and would have to be unstaged",
                )

    async def ensure_mount(self, volume: Volume, request: csi_pb2.NodePublishVolumeRequest) -> None:
        """Before a publish on the host: stage a volume that is staged as block as the CO asked; `StageForgotten`."""
        paths = volume.paths
        if not await workers.run(private_directories.is_staged, paths):
            return
        staged = await self._staged(paths, request, "as a filesystem for a mount on the host")
        with _hiding_secrets(staged):
            await self.stage_as_asked(volume, staged)

    async def stage_raw(self, volume: Volume, request: csi_pb2.NodeStageVolumeRequest) -> None:
        """Stage a volume with the record of a deferred mount as a raw block volume.

        Raises `StagedForMount`, unless the record is from before a reboot: no stage is known, nothing is published.
        """
        if volume.paths.key in self.requests or await workers.run(leaves.is_in_use, volume.paths):
            raise StagedForMount(volume.paths.key)
        await self.stage_as_asked(volume, request)

    async def stage_as_asked(self, volume: Volume, request: csi_pb2.NodeStageVolumeRequest) -> None:
        """Stage a volume that has a record as the CO outcome.

        The record stays until the driver has staged: if the shim is killed before that, the retry begins again.
        """
        await self._unstage_block(volume, request.staging_target_path)
        _log.info("staged again as asked", extra={"volume": str(volume.paths.key)})
        await self._node.NodeStageVolume(request, **volume.onward)
        await workers.run(private_directories.remove_staging, volume.paths)
        self.requests[volume.paths.key] = request

    async def unstage(self, volume: Volume, co_path: str) -> None:
        """NodeUnstageVolume of a volume that is staged as block. Raises `PublishedAsBlock`, `DriverDidNotCleanUp`."""
        # the driver may have it in the CO's way as well
        was_changed = await workers.run(private_directories.is_changing, volume.paths)
        await self._unstage_block(volume, co_path)
        if was_changed or await workers.run(private_directories.is_mounted, co_path):
            await self._unstage_at(volume, co_path)
        await workers.run(private_directories.remove_staging, volume.paths)
        self.forget(volume.paths.key)

    async def _unstage_block(self, volume: Volume, co_path: str) -> None:
        for leaf in await workers.run(leaves.of, volume.paths):
            seen = await workers.run(leaves.look, leaf)
            # an interrupted expansion left the leaf of the staging path: nobody has it
            if seen.mounts and leaf != volume.paths.leaf(co_path):
                raise errors.NotReady.named(
                    "PublishedAsBlock",
                    f"volume {volume.paths.key} cannot be unstaged",
                    why=f"its device is published at {leaf}",
                )
            # a leaf without a mount is that of a publish of an earlier boot
            with contextlib.suppress(PeerStatus):  # the unstage, which follows, decides
                request = as_block.unpublish_request(volume.paths, leaf)
                await self._node.NodeUnpublishVolume(request, **volume.onward)
            await workers.run(leaves.remove, leaf)
        secrets = await workers.run(private_directories.had_secrets, volume.paths)
        await workers.run(private_directories.begin_change, volume.paths, secrets=secrets)
        await self._unstage_at(volume, volume.paths.staging)

    async def _unstage_at(self, volume: Volume, path: str) -> None:
        request = csi_pb2.NodeUnstageVolumeRequest(
            volume_id=volume.paths.key.volume_id, staging_target_path=path
        )
        await self._node.NodeUnstageVolume(request, **volume.onward)


@contextlib.contextmanager
def _hiding_secrets(request: csi_pb2.NodeStageVolumeRequest) -> Iterator[None]:
    """Hide the secrets of the stage in a driver's error: the caller of the publish has not sent them."""
    try:
        yield
    except PeerStatus as status:
        text = redaction.without_secrets(status.text, request)
        if text == status.text:
            raise
        raise PeerStatus(status.code, text) from None
    except errors.CrustError as error:
        error.what = redaction.without_secrets(error.what, request)
        raise
