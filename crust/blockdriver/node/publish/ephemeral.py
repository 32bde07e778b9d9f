"""Inline ephemeral volumes: a volume from a pod's manifest, which lives as long as the pod.

There is no CreateVolume, no stage and no DeleteVolume: NodePublishVolume creates, stages and publishes, and
NodeUnpublishVolume undoes all three. Each step is the one of other volumes, with its record, its reservation and its
crash behaviour; a completed step is a success, so a retry continues where the last call ended. The CO's id (`csi-`
and a digest) names the volume only on this node and is never listed. A volume with a damaged record is kept and
reported, and its pod does not wait for it.

A reboot does not end a pod: its volume keeps its data. A publish that fails undoes only its own steps.
"""

import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from crust import deferral_keys, errors, quantities, volumes
from crust.blockdriver.node.live_volumes import LiveVolumes
from crust.blockdriver.node.node_stage import NodeStage, Stage
from crust.blockdriver.node.node_unpublish import NodeUnpublish
from crust.blockdriver.node.node_unstage import NodeUnstage
from crust.blockdriver.node.publish.publish_rules import Publish
from crust.blockdriver.records import ephemeral_names
from crust.blockdriver.records.pool import Pool
from crust.blockdriver.records.stored_record import UNREADABLE
from crust.blockdriver.records.volume_records import VolumeRecords
from crust.host.process import workers

SIZE = "size"
T = TypeVar("T")

_log = logging.getLogger(__name__)


class InvalidEphemeralSize(errors.InvalidRequest):
    """The size in a pod's manifest is invalid."""

    def __init__(self, text: str) -> None:
        super().__init__(
            f"the volume attribute {SIZE} cannot be {text[:64]!r}",
            why="it must be a number of bytes, or one with a unit such as 512Mi",
            hint="correct the pod's volumeAttributes",
        )


class EphemeralInSharedPool(errors.Unsupported):
    """An inline ephemeral volume in a pool that several nodes reach."""

    def __init__(self) -> None:
        super().__init__(
            "no inline ephemeral volume is created in this pool",
            why="several nodes reach it, and only the pod's own node is told of the pod's end: if that node is lost, "
            "no other one can tell whether the volume is still used",
            hint="use a generic ephemeral volume (volumeClaimTemplate), which the controller creates",
        )


class NotEphemeral(errors.InvalidRequest):
    """A volume from CreateVolume is published as an ephemeral one."""

    def __init__(self, volume_id: str) -> None:
        super().__init__(
            f"{volume_id} is not published as an ephemeral volume",
            why=f"it was created by CreateVolume, and the volume context says {deferral_keys.INLINE}: true",
            hint="remove that key from the PersistentVolume's attributes",
        )
        self.volume_id = volume_id


def is_wanted(request: Publish) -> bool:
    """Whether a publish is of an ephemeral volume."""
    return deferral_keys.is_inline(dict(request.volume_context))


def size_bytes(text: str) -> int:
    """Read a size; raises `InvalidEphemeralSize`."""
    found = quantities.parse(text)
    if not found:
        raise InvalidEphemeralSize(text)
    return found


@dataclass(frozen=True, slots=True)
class EphemeralVolume:
    """A pod's request; with size 0 the driver chooses the size."""

    name: str
    size_bytes: int
    capability: volumes.VolumeCapability
    parameters: tuple[tuple[str, str], ...]


class EphemeralProvisioner(Protocol):
    """Creates and deletes volumes: the controller part implements it, `app` connects the two."""

    async def create_ephemeral(self, wanted: EphemeralVolume) -> None:
        """Create the volume; created already is a success. Raises `Conflict` if it exists with another size."""
        ...

    async def delete(self, volume_id: volumes.VolumeId) -> None:
        """Delete the volume; absent is a success."""
        ...


@dataclass(frozen=True, slots=True)
class EphemeralVolumes:
    """Publishes and unpublishes. The caller makes one call per volume at a time."""

    pool: Pool
    volume_records: VolumeRecords
    live: LiveVolumes
    provisioner: EphemeralProvisioner
    node_stage: NodeStage
    node_unstage: NodeUnstage
    node_unpublish: NodeUnpublish
    about_to_use: Callable[[volumes.VolumeId], None]
    """Told of each publish before its first step, in a thread."""

    def id_of(self, volume_id: str) -> volumes.VolumeId:
        """The driver's own id of the volume that the CO calls `volume_id`."""
        return ephemeral_names.id_of(self.pool, volume_id)

    def own(self, volume_id: volumes.VolumeId) -> volumes.VolumeId:
        """The driver's own id if `volume_id` is that of an ephemeral volume, and else `volume_id`."""
        own = self.id_of(volume_id)
        return own if self.volume_records.index.has(own) else volume_id

    def is_one(self, volume_id: volumes.VolumeId) -> bool:
        """Whether `volume_id` is what a CO calls an ephemeral volume that there is."""
        return self.volume_records.index.has(self.id_of(volume_id))

    async def publish(self, request: Publish, then: Callable[[Publish], Awaitable[T]]) -> T:
        """Create and stage the volume, and publish it by `then`.

        Raises `NotEphemeral`, `InvalidEphemeralSize`, and what the steps raise: `Conflict` for another size than
        before.
        """
        if self.volume_records.index.has(request.volume_id):
            raise NotEphemeral(request.volume_id)
        attributes = dict(request.volume_context)
        size = attributes.pop(SIZE, "")
        wanted = EphemeralVolume(
            ephemeral_names.name_of(request.volume_id),
            size_bytes(size) if size else 0,
            request.capability,
            tuple(sorted(attributes.items())),
        )
        own = replace(
            request,
            volume_id=self.id_of(request.volume_id),
            staging=_staging(request.target),
        )
        await workers.run(self.about_to_use, own.volume_id)
        record = await workers.run(self.volume_records.find, own.volume_id)
        existed = record is not None and record.phase == "ready"
        try:
            await self.provisioner.create_ephemeral(wanted)
            await self.node_stage.stage(Stage(own.volume_id, own.staging, own.capability))
            return await then(own)
        except errors.CrustError:
            if not existed:
                await self._undo(own)
            raise

    async def _undo(self, own: Publish) -> None:
        """Undo without a new error: the caller gets the first one, and the unpublish removes what stays."""
        try:
            await self._remove(own.volume_id, own.target)
        except errors.CrustError as err:
            _log.warning(
                "an ephemeral volume stays", extra={"volume_id": own.volume_id, "error": err}
            )

    async def unpublish(self, volume_id: volumes.VolumeId, target: volumes.TargetPath) -> None:
        """Unpublish and delete; raises what the steps raise, and the CO retries."""
        own = self.id_of(volume_id)
        await self.node_unpublish.unpublish(own, target)
        await self._remove(own, target)

    async def _remove(self, own: volumes.VolumeId, target: volumes.TargetPath) -> None:
        if await workers.run(self.live.live_publishes, own):
            return
        await self.node_unstage.unstage(own, _staging(target))
        try:
            await workers.run(self.volume_records.find, own)
        except UNREADABLE as err:
            # Its pod has ended, and must not wait for a repair of the record.
            _log.error("an ephemeral volume stays", extra={"volume_id": own, "error": err})
            return
        await self.provisioner.delete(own)


def _staging(target: volumes.TargetPath) -> volumes.TargetPath:
    """The staging path: the target's parent, which the CO made; nothing is ever written at a staging path."""
    return volumes.TargetPath(os.path.dirname(target.text))
