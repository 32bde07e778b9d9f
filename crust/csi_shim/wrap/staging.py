"""How a volume is staged at the wrapped driver: as block at the private path, or as the CO asked; and the change.

A stage as block formats nothing and parses nothing foreign, so it comes first where a publish decides. A publish
that decides otherwise lets the driver unstage and stage again. For that the shim keeps the CO's NodeStageVolume, with
its secrets, in memory and nowhere else; after a restart it has none. A volume whose stage had secrets is then
refused, because a driver that is staged without them may make a plain volume of an encrypted one.
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
from crust.rpc.serving.service import known_error
from crust.rpc.status import PeerStatus, Residue
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

_log = logging.getLogger(__name__)


class StageForgotten(errors.NotReady):
    """The volume must be staged in another way, and the request by which the CO staged it is not known any more."""

    def __init__(self, key: volumes.VolumeKey, wanted: str) -> None:
        super().__init__(
            f"volume {key} cannot be staged again, {wanted}",
            why="the shim was started after the volume was staged, and the stage may have had secrets, which are "
            "kept in memory only",
            hint="delete the pod and create it again: the CO then unstages and stages the volume",
        )


class StagedForMount(errors.Conflict):
    """The volume is staged as block for a deferred mount, and the CO wants it as a raw block volume."""

    def __init__(self, key: volumes.VolumeKey) -> None:
        super().__init__(
            f"volume {key} is staged for a deferred mount",
            why="it is asked for as a raw block volume, and is not both",
            hint="unpublish and unstage it first",
        )


@dataclass(frozen=True, slots=True)
class Volume:
    """The volume that a call is about, and whether its driver stages."""

    paths: PrivatePaths
    stages: bool
    onward: Mapping[str, Any]
    """How its driver is called (`as_block.onward`)."""


class Staging:
    """Stages volumes at the wrapped driver. The caller runs one operation per volume."""

    def __init__(self, node: "csi_pb2_grpc.NodeAsyncStub") -> None:
        self._node = node
        self.requests: dict[volumes.VolumeKey, csi_pb2.NodeStageVolumeRequest] = {}
        """The CO's, which succeeded; none since a restart."""
        self.on_host: set[tuple[volumes.VolumeKey, str]] = set()
        """Volume and target of ordinary publishes that have begun: while one is there, the stage must stay."""

    def forget(self, key: volumes.VolumeKey) -> None:
        """The volume is not staged any more."""
        self.requests.pop(key, None)
        self.on_host = {pair for pair in self.on_host if pair[0] != key}

    async def stage_as_block(self, volume: Volume, request: csi_pb2.NodeStageVolumeRequest) -> None:
        """NodeStageVolume as block, also if there is a record already: a reboot leaves it, and nothing else."""
        paths, is_first, is_called = volume.paths, False, False
        try:
            is_first = await workers.run(
                private_directories.make_staging, paths, secrets=bool(request.secrets)
            )
            is_called = True
            await self._node.NodeStageVolume(as_block.stage(request, paths), **volume.onward)
        except Exception as error:
            known = known_error("NodeStageVolume", "the shim", error)
            is_refused = isinstance(known, PeerStatus) and status.is_final(known)
            # of an earlier stage the driver may have everything still: a kubelet must not forget it
            left = not (is_first and (is_refused or not is_called)) or await self._is_left(volume)
            residue = Residue.EXISTS if left else Residue.NONE
            raise status.answer("NodeStageVolume", known, residue) from error
        self.requests[paths.key] = request

    async def _is_left(self, volume: Volume) -> bool:
        """The driver refused the first stage: nothing of it may be left, or the record stays and the CO unstages."""
        try:
            await workers.run(private_directories.remove_staging, volume.paths)
        except Exception as error:
            _log.warning("private staging directory kept", extra={"error": error})
            return True
        return False

    async def ensure_block(
        self, volume: Volume, request: csi_pb2.NodePublishVolumeRequest, *, is_block: bool
    ) -> None:
        """Before a deferred publish: whatever is staged as mount, which is not `is_block`, is staged as block.

        Raises `StageForgotten`, `csi.StagingPathNotGiven`.
        """
        if not volume.stages:
            return
        # The driver would not refuse it: its staging path is a private one of the shim.
        if not request.staging_target_path:
            raise csi.StagingPathNotGiven()
        if is_block:
            return
        known = self.requests.get(volume.paths.key)
        if known is None:
            raise StageForgotten(volume.paths.key, "as a block device for a deferred mount")
        await workers.run(self._check_not_on_host, volume.paths.key)
        _log.info("staged again as block", extra={"volume": str(volume.paths.key)})
        await self._unstage_at(volume, known.staging_target_path)
        with _hiding_secrets(known):
            await self.stage_as_block(volume, known)

    def _check_not_on_host(self, key: volumes.VolumeKey) -> None:
        """Complete where it matters: whoever knows the stage has seen all publishes since."""
        for target in sorted(target for of, target in self.on_host.copy() if of == key):
            if private_directories.is_mounted(target):
                raise errors.NotReady.named(
                    "PublishedOnHost",
                    f"volume {key} cannot be deferred",
                    why=f"it is published on this host at {target}, and would have to be unstaged",
                    hint="stop the pod that has it there",
                )

    async def ensure_mount(self, volume: Volume, request: csi_pb2.NodePublishVolumeRequest) -> None:
        """Before a publish on the host: stage as the CO asked what is staged as block. Raises `StageForgotten`."""
        paths = volume.paths
        if not await workers.run(private_directories.is_staged, paths):
            return
        known = self.requests.get(paths.key)
        if known is None:
            if await workers.run(private_directories.had_secrets, paths):
                raise StageForgotten(paths.key, "as a filesystem for a mount on the host")
            known = as_block.stage_of(request)
        with _hiding_secrets(known):
            await self.stage_as_asked(volume, known)

    async def stage_raw(self, volume: Volume, request: csi_pb2.NodeStageVolumeRequest) -> None:
        """As a raw block volume what has the record of a stage for a deferred mount.

        Raises `StagedForMount`, unless that stage is not known and nothing is published: it is of before a reboot.
        """
        if volume.paths.key in self.requests or await workers.run(leaves.is_in_use, volume.paths):
            raise StagedForMount(volume.paths.key)
        await self.stage_as_asked(volume, request)

    async def stage_as_asked(self, volume: Volume, request: csi_pb2.NodeStageVolumeRequest) -> None:
        """Stage what is staged as block for a deferred mount as the CO asked.

        The record stays until the driver has staged: if we are killed in between, the retry begins again.
        """
        await self._unstage_block(volume, request.staging_target_path)
        _log.info("staged again as asked", extra={"volume": str(volume.paths.key)})
        await self._node.NodeStageVolume(request, **volume.onward)
        await workers.run(private_directories.remove_staging, volume.paths)
        self.requests[volume.paths.key] = request

    async def unstage(self, volume: Volume, co_path: str) -> None:
        """NodeUnstageVolume of a volume that is staged as block. Raises `PublishedAsBlock`, `DriverDidNotCleanUp`."""
        await self._unstage_block(volume, co_path)
        if await workers.run(private_directories.is_mounted, co_path):
            # killed between the stage as mount and the removal of the record
            await self._unstage_at(volume, co_path)
        await workers.run(private_directories.remove_staging, volume.paths)
        self.forget(volume.paths.key)

    async def _unstage_block(self, volume: Volume, co_path: str) -> None:
        for leaf in await workers.run(leaves.of, volume.paths):
            # the staging path's own leaf is of an expansion that was interrupted: nobody has it
            await self._clear_leaf(volume, leaf, is_ours=leaf == volume.paths.leaf(co_path))
        await self._unstage_at(volume, volume.paths.staging)

    async def _unstage_at(self, volume: Volume, path: str) -> None:
        request = csi_pb2.NodeUnstageVolumeRequest(
            volume_id=volume.paths.key.volume_id, staging_target_path=path
        )
        await self._node.NodeUnstageVolume(request, **volume.onward)

    async def _clear_leaf(self, volume: Volume, leaf: str, *, is_ours: bool) -> None:
        """What is left of a publish of an earlier boot: only what is not mounted."""
        found = await workers.run(leaves.look, leaf)
        if found.mounts and not is_ours:
            raise errors.NotReady.named(
                "PublishedAsBlock",
                f"volume {volume.paths.key} cannot be unstaged",
                why=f"its device is published at {leaf}",
                hint="unpublish it first: the CO's NodeUnpublishVolume does",
            )
        with contextlib.suppress(PeerStatus):  # the unstage, which follows, decides
            request = as_block.unpublish(volume.paths, leaf)
            await self._node.NodeUnpublishVolume(request, **volume.onward)
        await workers.run(leaves.remove, leaf)


@contextlib.contextmanager
def _hiding_secrets(request: csi_pb2.NodeStageVolumeRequest) -> Iterator[None]:
    """The caller of a publish has not sent the secrets of the stage: a driver's error must not show them to it."""
    try:
        yield
    except PeerStatus as status:
        hidden = redaction.without_secrets(status.text, request)
        if hidden == status.text:
            raise
        raise PeerStatus(status.code, hidden) from None
    except errors.CrustError as error:
        error.what = redaction.without_secrets(error.what, request)
        raise
