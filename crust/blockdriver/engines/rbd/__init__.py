"""The engine for images in a Ceph pool (RBD): images, snapshots and records in one namespace.

    place, pool              where it is, which pool it is, and the lock of its active controller
    records                  the records, and the intents of unfinished volumes and sets
    provisioning/            what a controller changes and asks: `engine`, on top of `snapshots`, on top of `images`
      copies                 how a volume is made: empty, or as a clone
      image_use              who has an image open, and changes that harm none of them
      librbd_objects         headers of images, librbd's names and its trash
      background             work that takes the time of the data
      freeing                images whose clients ended without closing them, or whose nodes are gone
    node/                    what a node has
      access, host_devices   a hypervisor opens an image itself, or this host's kernel maps it
      volume_users           as which user of Ceph a node connects

The pool is the only truth, and one controller serves it at a time (`crust.ceph.controller_lock`). A host whose kernel
cannot map images refuses raw volumes and mounts; a hypervisor does not need the kernel.
"""

import functools

from crust.blockdriver.engines.pool_access import pool_of
from crust.blockdriver.engines.protocol import Engine
from crust.blockdriver.engines.rbd.node.access import RbdAccess, noted
from crust.blockdriver.engines.rbd.node.volume_users import Users, VolumeUsers
from crust.blockdriver.engines.rbd.place import Place
from crust.blockdriver.engines.rbd.pool import RbdPool
from crust.blockdriver.engines.rbd.provisioning.engine import RbdProvisioning
from crust.blockdriver.engines.rbd.records import store

__all__ = ["Place", "engine", "node_engine"]


def engine(
    place: Place, *, run_dir: str, create: bool = False, node: str = "", trash_keep_s: int = 0
) -> Engine:
    """The engine of a controller with the pool in `place`, without I/O; `create` as `RbdPool` has it, `trash_keep_s`
    as `VolumeImages`. What this node has attached is noted in `run_dir`, and `node` is this node's name in claims.
    """
    made = RbdProvisioning(place, trash_keep_s)
    return Engine(
        "rbd",
        RbdPool(place, run_dir=run_dir, create=create, on_close=made.stop),
        made,
        RbdAccess(Users(place), run_dir, node),
        functools.partial(store, place),
        limits=made,
        fencing=made.freeing,
    )


def node_engine(monitors: str, pool: str, namespace: str, *, run_dir: str, node: str) -> Engine:
    """The engine of a node that has no key of its own, only those that calls bring (`volume_users`). Without I/O."""

    def pool_noted() -> str:
        return next((found for each in noted(run_dir) if (found := pool_of(each))), "")

    users = VolumeUsers(monitors, pool, namespace, pool_noted)
    made = RbdProvisioning(users.shared)
    return Engine(
        "rbd",
        users,
        made,
        RbdAccess(users, run_dir, node),
        functools.partial(store, users.shared),
        limits=made,
    )
