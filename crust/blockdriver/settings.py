"""The settings of `crust driver`: engine and mode must fit together; a combination that cannot work is refused here.

A setting that the chosen mode would ignore is refused too, so that its author does not expect an effect.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

import pydantic
from pydantic import Field

from crust.core.settings import OWN_DRIVER, program

DEFAULT_MAX_VOLUMES = 128
DEFAULT_POOL_LOW_PERCENT = 10
DEFAULT_MAX_SNAPSHOTS_PER_VOLUME = 250
DEFAULT_POOL = "default"
"""The pool of a class that names none: the driver's own `state_dir`."""
LOCAL_ENGINES = frozenset({"files"})
"""The engines whose pool is on one node: only a driver that runs there can make volumes in it."""

_NODE_SETTINGS = (
    "create_pool",
    "state_dir",
    "pool_id_file",
    "target_roots",
    "check_propagation",
    "max_volumes",
    "runtime_socket",
    "io_cgroup",
)


class RbdSettings(program.Table):
    """The Ceph pool of `engine = "rbd"`. An administrator makes the pool, the namespace and the users."""

    monitors: Annotated[str, Field(min_length=1, max_length=4096)]
    """The monitors' addresses, each with its protocol, as `ceph mon dump` shows them:
    [v2:192.0.2.1:3300,v1:192.0.2.1:6789]."""

    pool: Annotated[str, Field(min_length=1, max_length=128)]
    """The pool, which `rbd pool init` was run for."""

    namespace: program.CephNamespace = ""
    """The namespace of the pool, for this driver alone; empty: the pool's default one."""

    user: Annotated[str, Field(max_length=128)] = ""
    """The user, without `client.`; docs/ceph.md has the capabilities that it needs. Empty in mode node: the
    user and the key of each volume come with the calls, as secrets."""

    key_file: program.AbsolutePath | Literal[""] = ""
    """The file with the user's key, or its keyring, which only its owner may read. It belongs to the controller."""

    create_pool: bool = False
    """Whether a first start makes an empty namespace crust's pool."""

    trash_keep_s: Annotated[int, Field(ge=0, le=365 * 86400)] = 0
    """How many seconds RBD's trash keeps the image of a deleted volume, for `rbd trash restore`; its space is free
    after that."""


class PoolSettings(program.Table):
    """A further pool. What the table leaves out is as the driver's own setting."""

    state_dir: program.AbsolutePath
    """The pool's directory."""

    pool_id_file: program.AbsolutePath | Literal[""] = ""
    """Where its id is remembered; empty: `state_dir` with `.pool-id` added."""

    overcommit: Annotated[float, Field(ge=1, le=100)] = 1.0
    provisioning: Literal["thin", "thick"] = "thin"
    pool_low_percent: Annotated[int, Field(ge=0, le=100)] = DEFAULT_POOL_LOW_PERCENT


class DriverSettings(program.ProgramSettings):
    """`crust driver`."""

    driver_name: program.CsiName = OWN_DRIVER
    """The driver's name for the CO. Two drivers of one cluster, of different engines, have different ones; it never
    changes while the driver has volumes."""

    socket: program.SocketPath
    """The socket that the shim, or a CO, calls."""

    mode: Literal["all", "controller", "node"] = "all"
    """Which of CSI's services run: both, or one of them; the RPCs of the other are UNIMPLEMENTED then."""

    engine: Literal["files", "rbd"] = "files"
    """Where volumes are stored. files: sparse files in `state_dir`, attached by loop devices. rbd: images in the Ceph
    pool of the table `rbd`, which hypervisors open, or this host's kernel where it has rbd."""

    rbd: RbdSettings | None = None
    """The Ceph pool, a table of its own."""

    kubernetes: program.KubernetesAccess | None = None
    """For a controller of the engine rbd: access to the Kubernetes API, a table of its own. Nodes that have the taint
    node.kubernetes.io/out-of-service are cut off from their images then; else only `crust ceph fence` does that."""

    node_deployment: bool = False
    """Whether each node's driver provisions for its own node, called by sidecars with --node-deployment: no attach,
    and NodeExpandVolume grows the volume itself."""

    state_dir: program.AbsolutePath = "/var/lib/crust/block"
    """The pool: volumes and their records. Survives reboots."""

    pools: Mapping[program.PoolName, PoolSettings] = {}
    """Further pools of this node, of the engine files, a table each: a StorageClass names one by `crust.dev/pool`. A
    class without it, or with `default`, means the pool in `state_dir`."""

    create_pool: bool = False
    """Whether a first start makes the pool in `state_dir`. False: `crust driver init-pool` does."""

    pool_id_file: program.AbsolutePath | Literal[""] = ""
    """Where the id of this node's pool is remembered over reboots, not on the pool's disk; empty: `state_dir` with
    `.pool-id` added."""

    run_dir: program.AbsolutePath = "/run/crust/driver"
    """State that is invalid after a reboot."""

    node_id: Annotated[str, Field(min_length=1, max_length=256)]
    """This node's name for the CO."""

    target_roots: Annotated[tuple[program.AbsolutePath, ...], Field(min_length=1)] = (
        "/var/lib/kubelet",
    )
    """The driver stages and publishes volumes below these directories."""

    check_propagation: bool = True
    """Refuse to start where mounts would not reach the host. False: the CO lives in our mount namespace."""

    csi_profile: program.CsiProfile = "1.12"
    """Which health capabilities are advertised."""

    overcommit: Annotated[float, Field(ge=1, le=100)] = 1.0
    """How many times the pool's capacity may be provisioned to thin volumes. 1: every volume can be filled."""

    provisioning: Literal["thin", "thick"] = "thin"
    """The kind of a new volume whose class has no `crust.dev/provisioning`. thin: blocks are allocated when they are
    written. thick: all of them at the creation, for good; not on btrfs and not with the engine rbd."""

    reserve_snapshots: bool = True
    """Whether, with `overcommit` 1 or a thick volume, a snapshot that shares blocks with its volume (xfs, btrfs,
    Ceph) is refused unless as much is free as it adds: the volume's blocks that no other snapshot has. False: it is
    always taken, and when the pool is full, volumes with snapshots get I/O errors at writes to their own data."""

    max_snapshots_per_volume: Annotated[int, Field(ge=1, le=100_000)] = (
        DEFAULT_MAX_SNAPSHOTS_PER_VOLUME
    )
    """How many snapshots a volume may have, those in groups included. The kernel's rbd opens no image with more than
    510."""

    pool_low_percent: Annotated[int, Field(ge=0, le=100)] = DEFAULT_POOL_LOW_PERCENT
    """`crust status`, doctor and the alert warn when less than this part of the pool is free. 0: never."""

    max_volumes: Annotated[int, Field(ge=1, le=1_000_000)] = DEFAULT_MAX_VOLUMES
    """How many volumes the node accepts, of all pools together."""

    runtime_socket: program.SocketPath | Literal[""] = ""
    """The proxy's Runtime API, for calls to guests with deferred volumes; empty: the driver cannot call them."""

    io_cgroup: program.AbsolutePath | Literal[""] = ""
    """The pod cgroup, as a path in its hierarchy; empty: /kubepods.slice or /kubepods."""

    def by_pool(self) -> "dict[str, DriverSettings]":
        """The settings of each pool, as a driver of it alone has them; first those of the default one."""
        settings = {DEFAULT_POOL: self}
        for name, pool in self.pools.items():
            own = {key: getattr(pool, key) for key in pool.model_fields_set}
            places = {"run_dir": f"{self.run_dir}/pools/{name}", "pool_id_file": pool.pool_id_file}
            settings[name] = self.model_copy(update={**own, **places})
        return settings

    @pydantic.model_validator(mode="after")
    def _fits_the_engine(self) -> Self:
        if (self.engine == "rbd") != (self.rbd is not None):
            raise ValueError(
                'engine is "rbd", and there is no table rbd with its pool'
                if self.rbd is None
                else f"the table rbd is there, and engine is {self.engine}"
            )
        if self.rbd is not None and bool(self.rbd.user) != bool(self.rbd.key_file):
            raise ValueError("of user and key_file of the table rbd one is set: set both or none")
        if self.rbd is not None and not self.rbd.user and self.mode != "node":
            raise ValueError(
                f"the table rbd has no user and key_file, and mode is {self.mode}: only to a node calls bring keys"
            )
        if self.kubernetes is not None and (self.engine, self.mode) != ("rbd", "controller"):
            raise ValueError(
                f"the table kubernetes is there, engine is {self.engine} and mode {self.mode}: only a controller of "
                "the engine rbd fences nodes that Kubernetes has declared gone"
            )
        if self.rbd is not None and self.rbd.user and self.mode == "node":
            raise ValueError(
                "the table rbd has user and key_file, and mode is node: a node keeps no key, its calls bring them "
                "(node-stage-secret-name and node-publish-secret-name of the StorageClass); take both out"
            )
        if self.engine == "rbd" and self.node_deployment:
            raise ValueError(
                "node_deployment is set, and every node reaches the pool of the engine rbd: run a controller"
            )
        if self.engine == "rbd" and self.provisioning == "thick":
            raise ValueError(
                "provisioning is thick, and Ceph allocates the blocks of an image when they are written"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _pools_and_mode_fit(self) -> Self:
        for pool in self.by_pool().values():
            if f"{pool.pool_id_file}/".startswith(f"{pool.state_dir.rstrip('/')}/"):
                raise ValueError(
                    "pool_id_file is inside of state_dir: it would be gone with the pool"
                )
        if self.pools and self.engine not in LOCAL_ENGINES:
            raise ValueError(
                f"pools are there, and engine is {self.engine}: each of its pools is a driver of its own name"
            )
        if DEFAULT_POOL in self.pools:
            raise ValueError(f"pools.{DEFAULT_POOL} is the pool in state_dir: give it another name")
        if self.node_deployment and self.mode != "all":
            raise ValueError(
                f"node_deployment is set, and mode is {self.mode}: each node's driver is its own controller"
            )
        if self.mode != "all" and self.engine in LOCAL_ENGINES:
            raise ValueError(
                f"mode is {self.mode}, and the pool of the engine {self.engine} is on one node, where its controller "
                "runs too: leave mode out, and on many nodes set node_deployment"
            )
        if self.mode != "controller":
            return self
        if alien := [name for name in _NODE_SETTINGS if name in self.model_fields_set]:
            raise ValueError(
                f"mode is controller, and {', '.join(alien)} is of the node service: leave it out"
            )
        return self
