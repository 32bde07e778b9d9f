"""The nodes that a CO published a volume to (ControllerPublishVolume), and the rules that follow.

One node at a time has a volume. The controller part writes the list, and the node part obeys it: a volume that was
published read-only is mounted read-only, and one that another node has is not staged.
"""

from crust import errors
from crust.blockdriver.records.models import VolumeRecord


class PublishedToOtherNode(errors.NotReady):
    """Another node has the volume."""

    def __init__(self, volume_id: str, node_id: str) -> None:
        super().__init__(
            f"{volume_id} is published to the node {node_id}",
            why="one node at a time can have it",
            hint="unpublish it there first",
        )
        self.node_id = node_id


class AttachLimitReached(errors.Exhausted):
    """The node has reached its attach limit."""

    def __init__(self, node_id: str, limit: int) -> None:
        super().__init__(
            f"no more volumes can be published to {node_id}",
            why=f"its attach limit of {limit} is reached",
            hint="unpublish one, or use another node",
        )
        self.limit = limit


def is_readonly(record: VolumeRecord) -> bool:
    """Whether the CO published the volume to its node read-only."""
    return any(each.readonly for each in record.nodes)


def check_not_elsewhere(record: VolumeRecord, node_id: str) -> None:
    """Raise `PublishedToOtherNode` while the volume is published to a node other than `node_id`.

    Published to no node is allowed: a CO with CSIDriver attachRequired: false never publishes to nodes.
    """
    if record.nodes and all(each.node_id != node_id for each in record.nodes):
        raise PublishedToOtherNode(record.volume_id, record.nodes[0].node_id)


def check_not_published(record: VolumeRecord) -> None:
    """Raise `PublishedToOtherNode` while the volume is published to a node."""
    if record.nodes:
        raise PublishedToOtherNode(record.volume_id, record.nodes[0].node_id)
