"""Composition of the node part: stage, publish, expand, statistics."""

from crust import operations
from crust.blockdriver.driver import Stores
from crust.blockdriver.node.filesystems.filesystem_preparation import FilesystemPreparation
from crust.blockdriver.node.io_limits import IoLimits
from crust.blockdriver.node.live_volumes import LiveVolumes
from crust.blockdriver.node.node_expand import ImageGrowth, NodeExpand
from crust.blockdriver.node.node_stage import NodeStage
from crust.blockdriver.node.node_stats import NodeStats
from crust.blockdriver.node.node_unpublish import NodeUnpublish, NodeUnstage
from crust.blockdriver.node.publish.deferred_publish import DeferredNodePublish
from crust.blockdriver.node.publish.host_image import HostImage
from crust.blockdriver.node.publish.node_publish import NodePublish
from crust.blockdriver.node.publish.publish_rules import PublishCheck
from crust.blockdriver.records.attach_slots import AttachSlots
from crust.blockdriver.records.health import HealthCheck
from crust.blockdriver.services.node import NodeRules
from crust.blockdriver.services.roles import NodeIdentity


def rules(  # noqa: PLR0913 - composition
    identity: NodeIdentity,
    stores: Stores,
    live: LiveVolumes,
    attach_slots: AttachSlots,
    io_limits: IoLimits,
    health_check: HealthCheck,
    target_roots: tuple[str, ...],
    grow_image: ImageGrowth | None,
    running: operations.KeyedOperations,
) -> NodeRules:
    """The rules of the node part."""
    volume_records, content_records = stores.volume_records, stores.content_records
    node_state, access = stores.node_state, stores.access
    node_expand = NodeExpand(
        volume_records, content_records, node_state, access, stores.supported, grow_image
    )
    publish_check = PublishCheck(
        volume_records, content_records, node_state, live, stores.supported
    )
    preparation = FilesystemPreparation(content_records, access)
    host_image = HostImage(node_state, publish_check, io_limits, preparation, stores.tool_locks)
    node_unpublish = NodeUnpublish(stores.pool, node_state, access, target_roots)
    node_stage = NodeStage(
        volume_records=volume_records,
        content_records=content_records,
        node_state=node_state,
        access=access,
        supported=stores.supported,
        io_limits=io_limits,
        attach_slots=attach_slots,
        preparation=preparation,
        tool_locks=stores.tool_locks,
        node_id=identity.node_id,
    )
    node_unstage = NodeUnstage(stores.pool, node_state, live, access, io_limits)
    return NodeRules(
        volume_records=volume_records,
        live=live,
        max_volumes=attach_slots.limit,
        io_limits=io_limits,
        fs_types=stores.supported.fs_types,
        node_stage=node_stage,
        node_unstage=node_unstage,
        node_publish=NodePublish(
            content_records=content_records,
            node_state=node_state,
            publish_check=publish_check,
            io_limits=io_limits,
            node_expand=node_expand,
            host_image=host_image,
            target_roots=target_roots,
        ),
        deferred_publish=DeferredNodePublish(
            content_records, node_state, publish_check, io_limits, host_image
        ),
        node_unpublish=node_unpublish,
        node_expand=node_expand,
        node_stats=NodeStats(
            volume_records,
            node_state,
            access,
            health_check,
            tells_condition=identity.tells_condition,
            running=running,
        ),
        health_check=health_check,
    )
