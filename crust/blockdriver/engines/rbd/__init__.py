"""The engine for images in a Ceph pool (RBD): images, snapshots and records in one namespace.

`provisioning` is the controller's side: `engine`, on top of `snapshots`, on top of `images`; `node` is the node's.
The pool is the only truth, and one controller serves it at a time (`crust.blockdriver.ceph.controller_lock`). A host
whose kernel cannot map images refuses raw volumes and mounts; a hypervisor does not need the kernel.
"""

import functools

from crust.blockdriver.engines.pool_access import pool_of
from crust.blockdriver.engines.protocol import Engine
from crust.blockdriver.engines.rbd.namespace import Namespace
from crust.blockdriver.engines.rbd.node.access import RbdAccess, noted
from crust.blockdriver.engines.rbd.node.volume_users import Users, VolumeUsers
from crust.blockdriver.engines.rbd.pool import RbdPool
from crust.blockdriver.engines.rbd.provisioning.engine import RbdProvisioning
from crust.blockdriver.engines.rbd.records import store

__all__ = ["Namespace", "engine", "node_engine"]


def engine(
    place: Namespace, *, run_dir: str, create: bool = False, node: str = "", trash_keep_s: int = 0
) -> Engine:
    """The engine of a controller with the pool in `place`, without I/O; `create` is for `RbdPool`, `trash_keep_s` for
    `VolumeImages`. Notes of this node's attachments are in `run_dir`, and `node` is this node's name in claims.
    """
    provisioning = RbdProvisioning(place, trash_keep_s)
    return Engine(
        RbdPool(place, run_dir=run_dir, create=create, on_close=provisioning.stop),
        provisioning,
        RbdAccess(Users(place), run_dir, node),
        functools.partial(store, place),
        set_limits=provisioning.set_limits,
        fence=provisioning.freeing.fence,
    )


def node_engine(monitors: str, pool: str, namespace: str, *, run_dir: str, node: str) -> Engine:
    """The engine of a node without a key of its own: calls bring the keys (`volume_users`). Without I/O."""
    users = VolumeUsers(
        monitors, pool, namespace, lambda: next(filter(None, map(pool_of, noted(run_dir))), "")
    )
    provisioning = RbdProvisioning(users.shared)
    return Engine(
        users,
        provisioning,
        RbdAccess(users, run_dir, node),
        functools.partial(store, users.shared),
        set_limits=provisioning.set_limits,
    )
