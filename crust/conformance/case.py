"""A case: a number that never changes, the capabilities that it needs, and a docstring that is its rule."""

from collections.abc import Callable
from typing import TypeVar

import pytest

F = TypeVar("F", bound=Callable[..., object])
MARK = "case"

CREATE = "controller.CREATE_DELETE_VOLUME"
PUBLISH = "controller.PUBLISH_UNPUBLISH_VOLUME"
READONLY = "controller.PUBLISH_READONLY"
LIST = "controller.LIST_VOLUMES"
LIST_NODES = "controller.LIST_VOLUMES_PUBLISHED_NODES"
GET = "controller.GET_VOLUME"
CAPACITY = "controller.GET_CAPACITY"
SNAPSHOT = "controller.CREATE_DELETE_SNAPSHOT"
LIST_SNAPSHOTS = "controller.LIST_SNAPSHOTS"
GET_SNAPSHOT = "controller.GET_SNAPSHOT"
CLONE = "controller.CLONE_VOLUME"
EXPAND = "controller.EXPAND_VOLUME"
MODIFY = "controller.MODIFY_VOLUME"
GROUP = "group.CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT"
METADATA = "plugin.SNAPSHOT_METADATA_SERVICE"
TOPOLOGY = "plugin.VOLUME_ACCESSIBILITY_CONSTRAINTS"
ONLINE = "plugin.ONLINE"
NODE = "node"
FEW_VOLUMES_MAX = 32
"""An attach limit up to this is tried out."""
FEW_VOLUMES = f"node.max_volumes_per_node<={FEW_VOLUMES_MAX}"
STAGE = "node.STAGE_UNSTAGE_VOLUME"
STATS = "node.GET_VOLUME_STATS"
NODE_EXPAND = "node.EXPAND_VOLUME"
MULTI_WRITER = "node.SINGLE_NODE_MULTI_WRITER"
MOUNT_GROUP = "node.VOLUME_MOUNT_GROUP"
DEFER = "node.DEFER_FS_OPS"
BLOCK = "parameters.block"
EPHEMERAL = "parameters.ephemeral_context"
RESTART = "option.restart-command"


def case(number: int, *needs: str) -> Callable[[F], F]:
    """Number a test function. It is skipped unless the driver has every one of `needs`."""

    def mark(function: F) -> F:
        marked: F = pytest.mark.case(f"C-{number:03d}", needs)(function)
        return marked

    return mark


def number_of(function: object) -> str:
    """The number of a marked function."""
    return next(
        str(each.args[0]) for each in getattr(function, "pytestmark", ()) if each.name == MARK
    )


def needs_of(function: object) -> tuple[str, ...]:
    """The capabilities that a marked function needs."""
    return next(
        tuple(each.args[1]) for each in getattr(function, "pytestmark", ()) if each.name == MARK
    )
