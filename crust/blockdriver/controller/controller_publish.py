"""ControllerPublishVolume and ControllerUnpublishVolume: which node a CO gave a volume to, and whether to read only.

A file is where it is, so nothing is moved: the publish is an entry in the volume's record, durable before it is
answered. The node side reads it: a volume that was published read-only is read-only wherever it is then mounted.
A node has no more of them than it can hold (`NodeVolumes.attach_limit`), and those that pods brought without a
controller's word count as well: a volume that is sent where it cannot be staged keeps its pod waiting there.

One node at a time has a volume; the nodes that exist are this one, and whichever an older record still names (the
node was renamed, the pool moved), which keeps the volume until it is taken from it.
"""

import asyncio
import threading
from dataclasses import dataclass

from crust import errors, volumes
from crust.blockdriver.controller.node_part import NodeVolumes
from crust.blockdriver.engines.protocol import StillAttached
from crust.blockdriver.records import capability_check, published_nodes
from crust.blockdriver.records.capability_check import SupportedCapabilities
from crust.blockdriver.records.pool import Pool
from crust.blockdriver.records.volume_record import Attached, Record, Usage
from crust.blockdriver.records.volume_records import VolumeRecords


class NodeNotFound(errors.NotFound):
    """No node of this id has this driver's pool."""

    def __init__(self, node_id: str) -> None:
        super().__init__(
            f"there is no node {node_id!r}", why="this driver serves the node it runs on, alone"
        )
        self.node_id = node_id


class PublishedToNodeDifferently(errors.Conflict):
    """The volume is published to the node in another way."""

    def __init__(self, volume_id: str, node_id: str) -> None:
        super().__init__(
            f"{volume_id} is published to {node_id} already",
            why="with another capability, or another readonly",
            hint="unpublish it there first",
        )
        self.volume_id = volume_id


@dataclass(frozen=True, slots=True)
class Attach:
    """A ControllerPublishVolume, decoded."""

    volume_id: volumes.VolumeId
    node_id: str
    capability: volumes.VolumeCapability
    readonly: bool


@dataclass(frozen=True, slots=True)
class Slots:
    """How many volumes a node can have, and which it has, in one look."""

    limit: int
    taken: tuple[volumes.VolumeId, ...]


class ControllerPublish:
    """Publishes to nodes; one call per volume at a time is the caller's business."""

    def __init__(
        self,
        pool: Pool,
        known: VolumeRecords,
        node: NodeVolumes,
        supported: SupportedCapabilities,
        node_id: str,
    ) -> None:
        self._pool = pool
        self._volume_records = known
        self._node = node
        self._supported = supported
        self._node_id = node_id
        self._counting = threading.Lock()

    async def attach(self, request: Attach) -> None:
        """Give the volume to the node, or find that it has it.

        Raises `volume_records.VolumeNotFound`, `NodeNotFound`, `capability_check.CapabilityNotSupported`,
        `PublishedToNodeDifferently`, `published_nodes.PublishedToOtherNode`, `published_nodes.AttachLimitReached`.
        """
        await asyncio.to_thread(self._attach, request)

    def _attach(self, request: Attach) -> None:
        record = self._volume_records.load(request.volume_id)
        if request.node_id != self._node_id:
            raise NodeNotFound(request.node_id)
        if why := self._supported.obstacle(request.capability):
            raise capability_check.CapabilityNotSupported(why)
        wanted = _attached(request)
        present = next((each for each in record.nodes if each.node_id == request.node_id), None)
        if present is not None and not _is_same(present, wanted):
            raise PublishedToNodeDifferently(request.volume_id, request.node_id)
        if present is not None:
            return
        if record.nodes:
            raise published_nodes.PublishedToOtherNode(request.volume_id, record.nodes[0].node_id)
        self._add(record, wanted)

    def _add(self, record: Record, wanted: Attached) -> None:
        limit = self._node.attach_limit()
        with self._counting:  # two volumes must not both take the last slot
            others = self._taken() - {volumes.VolumeId(record.volume_id)}
            if len(others) >= limit:
                raise published_nodes.AttachLimitReached(self._node_id, limit)
            self._volume_records.save(record.but(nodes=(wanted,)))

    def _taken(self) -> set[volumes.VolumeId]:
        published = self._volume_records.index.on_node(self._node_id)
        return {*published, *self._node.attached_ids()}

    async def detach(self, volume_id: volumes.VolumeId, node_id: str) -> None:
        """Take the volume from the node, or from all if `node_id` is empty; not published is fine.

        Raises `StillAttached` while it is staged on this node, `pool.IdOfOtherPool`.
        """
        await asyncio.to_thread(self._detach, volume_id, node_id)

    def _detach(self, volume_id: volumes.VolumeId, node_id: str) -> None:
        self._pool.ids.check(volume_id)
        record = self._volume_records.find(volume_id)
        if record is None:
            return
        here = node_id in ("", self._node_id)
        paths = self._node.staging_paths(volume_id) if here else ()
        if paths and self._node.attached(volume_id):
            raise StillAttached(volume_id, f"a device, staged at {', '.join(paths)}")
        rest = tuple(each for each in record.nodes if node_id and each.node_id != node_id)
        if rest != record.nodes:
            self._volume_records.save(record.but(nodes=rest))

    def slots(self, node_id: str) -> Slots:
        """What `node_id` can hold and holds; raises `NodeNotFound`. Blocks."""
        if node_id != self._node_id:
            raise NodeNotFound(node_id)
        return Slots(self._node.attach_limit(), tuple(sorted(self._taken())))

    def published_nodes(self, record: Record) -> tuple[str, ...]:
        """Where the volume is: published to by a CO, or staged at this moment whatever was published."""
        nodes = {each.node_id for each in record.nodes}
        if self._node.staging_paths(volumes.VolumeId(record.volume_id)):
            nodes.add(self._node_id)
        return tuple(sorted(nodes))


def _attached(request: Attach) -> Attached:
    access, mode = request.capability.access, request.capability.mode.value
    if isinstance(access, volumes.MountAccess):
        usage = Usage(kind="mount", fs_type=access.fs_type, mode=mode)
    else:
        usage = Usage(kind="block", fs_type="", mode=mode)
    return Attached(node_id=request.node_id, usage=usage, readonly=request.readonly)


def _is_same(present: Attached, wanted: Attached) -> bool:
    """A filesystem that is not named is whichever the volume has, or will have once it is staged."""
    before, now = present.usage, wanted.usage
    alike = (before.kind, before.mode, present.readonly) == (now.kind, now.mode, wanted.readonly)
    return alike and ("" in (before.fs_type, now.fs_type) or before.fs_type == now.fs_type)
