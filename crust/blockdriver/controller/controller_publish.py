"""ControllerPublishVolume and ControllerUnpublishVolume: the node that has a volume, and whether it is read-only.

A file stays on its node, so the publish is only an entry in the volume's record, durable before the answer. The node
part reads it: a volume that was published read-only is mounted read-only. A node has no more volumes than its slots
(`AttachSlots`), because on a full node the volume's pod would wait.

One node at a time has a volume: this node, or a node that an older record still names (the node was renamed, the pool
was moved); that node has the volume until it is unpublished from it. The caller makes one call per volume at
a time.
"""

from crust.blockdriver.engines.protocol import StillAttached
from crust.blockdriver.records import capability_check
from crust.blockdriver.records.models import Attached
from crust.blockdriver.records.node_state import NodeNotFound
from crust.blockdriver.records.stores import Stores
from crust.core import errors, volumes


def publish_to_node(
    stores: Stores,
    volume_id: volumes.VolumeId,
    node_id: str,
    capability: volumes.VolumeCapability,
    *,
    readonly: bool,
) -> None:
    """Publish the volume to the node; a repeated publish is a success.

    Raises `models.VolumeNotFound`, `NodeNotFound`, `capability_check.CapabilityNotSupported`,
    `PublishedToNodeDifferently`, `capability_check.PublishedToOtherNode`, `AttachLimitReached`,
    `ImageMissing`, `ForeignImage`. Blocks.
    """
    record = stores.volume_records.load(volume_id)
    if node_id != stores.node_id:
        raise NodeNotFound(node_id)
    if why := stores.supported.obstacle(capability):
        raise capability_check.CapabilityNotSupported(why)
    usage = capability_check.usage_of(capability)
    requested = Attached(node_id=node_id, usage=usage, readonly=readonly)
    stores.provisioning.check_image(volume_id)
    present = next((node for node in record.nodes if node.node_id == node_id), None)
    if present is None:
        capability_check.check_not_published(record)
        with stores.attach_slots.taking(volume_id):
            stores.volume_records.save(record.replaced(nodes=(requested,)))
        return
    old, old_readonly = present.usage, present.readonly
    is_same = (old.kind, old.mode, old_readonly) == (usage.kind, usage.mode, readonly)
    # an empty fs_type matches any
    if not is_same or len({old.fs_type, usage.fs_type} - {""}) > 1:
        raise errors.Conflict.named(
            "PublishedToNodeDifferently",
            f"{volume_id} is published to {node_id} already",
            why="with another capability, or another readonly flag",
        )


def unpublish_from_node(stores: Stores, volume_id: volumes.VolumeId, node_id: str) -> None:
    """Unpublish the volume from the node, or from all nodes without `node_id`; an absent publish is a success.

    Raises `StillAttached` while it is staged on this node, `IdOfOtherPool`. Blocks.
    """
    stores.pool.ids.check_own_pool(volume_id)
    record = stores.volume_records.find(volume_id)
    if record is None:
        return
    on_this_node = node_id in ("", stores.node_id)
    paths = stores.node_state.staging_paths(volume_id) if on_this_node else ()
    if paths and stores.access.attached(volume_id):
        raise StillAttached(volume_id, f"a device, staged at {', '.join(paths)}")
    remaining = tuple(node for node in record.nodes if node_id and node.node_id != node_id)
    if remaining != record.nodes:
        stores.volume_records.save(record.replaced(nodes=remaining))
