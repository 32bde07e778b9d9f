"""The engine for images in a Ceph pool (RBD): images, snapshots and records in one namespace.

    place, pool              where it is, which pool it is, and the lock of its active controller
    records, intents         the records, and the unfinished volumes and sets
    provisioning/            what a controller changes and asks: `engine` puts it together
      lifecycle              the order in which a volume comes into being and goes
      images, snapshots,
      copies, limits, space  the images, and what is left for new ones
      image_use              who has an image open, asked before each change that could cut that client off
      image_change           asks again while it is changed, and ends the change when nobody answers
      background, directory  work that takes the time of the data; librbd's names and trash
      ended_claims           images whose clients ended without closing them become free
    node/                    what a node has
      access, host_devices   a hypervisor opens an image itself, or this host's kernel maps it
      volume_users           as which user of Ceph a node connects
      fencing                cuts off nodes that are declared gone

The pool is the only truth, and one controller serves it at a time (`crust.ceph.controller_lock`). A host whose kernel
cannot map images refuses raw volumes and mounts; a hypervisor does not need the kernel.
"""

import functools

from crust.blockdriver.engines.protocol import Engine
from crust.blockdriver.engines.rbd.node.access import RbdAccess, noted
from crust.blockdriver.engines.rbd.node.fencing import RbdFencing
from crust.blockdriver.engines.rbd.node.volume_users import OwnUser, VolumeUsers
from crust.blockdriver.engines.rbd.place import Place
from crust.blockdriver.engines.rbd.pool import RbdPool
from crust.blockdriver.engines.rbd.provisioning.engine import provisioning
from crust.blockdriver.engines.rbd.provisioning.limits import RbdLimits
from crust.blockdriver.engines.rbd.records import store
from crust.core.pool_ids import pool_of

__all__ = ["Place", "engine", "node_engine"]


def engine(
    place: Place, *, run_dir: str, create: bool = False, node: str = "", trash_keep_s: int = 0
) -> Engine:
    """The engine of a controller with the pool in `place`, without I/O; `create` as `RbdPool` has it, `trash_keep_s`
    as `VolumeImages`. What this node has attached is noted in `run_dir`, and `node` is this node's name in claims.
    """
    made = provisioning(place, trash_keep_s)

    return Engine(
        "rbd",
        RbdPool(place, run_dir=run_dir, create=create, on_close=made.stop),
        made,
        RbdAccess(OwnUser(place), run_dir, node),
        functools.partial(store, place),
        limits=RbdLimits(place),
        fencing=RbdFencing(place.connection.who, place.pool, place.namespace),
    )


def node_engine(monitors: str, pool: str, namespace: str, *, run_dir: str, node: str) -> Engine:
    """The engine of a node that has no key of its own, only those that calls bring (`volume_users`). Without I/O."""

    def pool_noted() -> str:
        return next((found for each in noted(run_dir) if (found := pool_of(each))), "")

    users = VolumeUsers(monitors, pool, namespace, pool_noted)

    return Engine(
        "rbd",
        users,
        provisioning(users.shared),
        RbdAccess(users, run_dir, node),
        functools.partial(store, users.shared),
        limits=RbdLimits(users.shared),
    )
