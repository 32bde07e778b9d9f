"""Settings: one frozen model per program; defaults < TOML file < CRUST_* environment < flags.

Unknown keys are refused. `load` takes its sources as arguments, so a test does not depend on its environment. Only
the module that composes a program sees its settings object: constructors get the two or three values that they need.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from crust import errors

ENVIRONMENT_PREFIX = "CRUST_"
_SERVICE_LINK = re.compile(
    r"_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$"
)
"""Variables that a kubelet sets in each pod for a Service whose name begins with "crust"."""

CsiProfile = Literal["1.12", "1.13"]
_PATH = r"^/"
_ADDRESS = r"^$|^([0-9A-Za-z.-]+|\[[0-9a-f:.]+\]):[0-9]{1,5}$"
_MEMBER = r"^([0-9A-Za-z.-]+|\[[0-9a-f:.]+\]):[0-9]{1,5}$"
_KEY_PREFIX = r"^/([0-9A-Za-z._-]+/)+$"
OWN_DRIVER = "block.csi.crust.dev"
"""The name of our driver, unless the settings give it another one."""
_DRIVER_NAME = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"
_MEANT = {
    _PATH: "an absolute path, without unix://",
    _ADDRESS: "host:port or [IPv6]:port, e.g. 127.0.0.1:9090",
    _MEMBER: "host:port or [IPv6]:port, without https://",
    _KEY_PREFIX: "names between slashes, e.g. /crust/, of letters, digits, '.', '-', '_'",
    _DRIVER_NAME: "a driver's name: letters, digits, '.', '-', '_', at most 63",
}
"""The patterns of settings, in words."""

AbsolutePath = Annotated[str, Field(pattern=_PATH, max_length=4095)]
SocketPath = Annotated[str, Field(pattern=_PATH, max_length=107)]
MetricsAddress = Annotated[str, Field(pattern=_ADDRESS, max_length=261)]


class InvalidSettings(errors.InvalidRequest):
    """A setting is missing, unknown or invalid."""

    def __init__(self, program: str, why: str) -> None:
        super().__init__(
            f"crust {program} cannot start", why=why, hint="see docs/operations.md, Settings"
        )


class ProgramSettings(BaseModel):
    """Settings of every daemon."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level that is logged. Level info has one line per RPC."""

    log_format: Literal["json", "console"] = "console"
    """json for a log collector."""

    take_over: bool = False
    """Whether a live process of the same locks is asked to hand its state over, so that callers notice no restart."""

    metrics_address: MetricsAddress = ""
    """Where Prometheus reads the metrics, host:port or [IPv6]:port; empty: no metrics. There is no authentication."""

    traces: bool = False
    """Whether spans go to the OpenTelemetry collector that OTEL_EXPORTER_OTLP_ENDPOINT names; extra otel."""

    @classmethod
    def at_endpoint(cls, given: Mapping[str, Any], endpoint: str) -> dict[str, Any]:
        """The settings of a program whose CSI socket is `endpoint`. Raises `ValueError` if it cannot be."""
        return {**given, "socket": endpoint}


class ServedDriver(BaseModel):
    """A CSI driver that the proxy serves."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    name: Annotated[str, Field(pattern=_DRIVER_NAME)]
    """The driver's name, as GetPluginInfo reports it."""

    socket: SocketPath
    """The socket that the CO calls, e.g. /var/lib/kubelet/plugins/<driver>/csi.sock."""

    backend: SocketPath
    """The shim's socket."""

    defer: Literal["", "always", "never", "runtime-class"] = ""
    """Decides where the volume says nothing: `crust.dev/defer` in its context comes first. Empty: never."""

    register_plugin: bool = True
    """Whether the proxy registers it with the kubelet, if `plugins_registry` is set."""


class KubernetesAccess(BaseModel):
    """How the Kubernetes API is reached."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    kubeconfig: AbsolutePath | Literal[""] = ""
    """Empty: by the service account of the pod that the program runs in."""


class KubernetesSettings(KubernetesAccess):
    """Access to the Kubernetes API, for volumes whose pod's RuntimeClass decides."""

    runtime_handlers: Annotated[tuple[str, ...], Field(min_length=1)]
    """The handlers (RuntimeClass.handler) whose pods get deferred volumes. The runtime registers by the same name."""

    node_name: Annotated[str, Field(min_length=1, max_length=253)] = os.uname().nodename
    """The name of this node's Node object. Default: the host's name."""


class ProxySettings(ProgramSettings):
    """`crust proxy`."""

    run_dir: AbsolutePath = "/run/crust"
    """The directory of the proxy's own sockets and locks; mode 0700."""

    volumes_root: AbsolutePath = "/run/crust/volumes"
    """The handoff directory. It belongs on a tmpfs: its entries are invalid after a reboot."""

    target_roots: Annotated[tuple[AbsolutePath, ...], Field(min_length=1)] = ("/var/lib/kubelet",)
    """Targets may be deferred below these directories: the kubelet's root."""

    drivers: tuple[ServedDriver, ...] = ()
    """The CSI drivers on the node that need no file of their own."""

    drivers_dir: AbsolutePath | Literal[""] = ""
    """Its files `*.toml` add drivers while the proxy runs: name, socket, backend. Empty: none is looked for."""

    plugins_registry: AbsolutePath | Literal[""] = ""
    """The kubelet's /var/lib/kubelet/plugins_registry, where drivers are registered. Empty: others register them."""

    kubernetes: KubernetesSettings | None = None
    """Access to the Kubernetes API, a table of its own. Without it `runtime-class` cannot be decided."""

    @pydantic.field_validator("drivers")
    @classmethod
    def _check_distinct(cls, drivers: tuple[ServedDriver, ...]) -> tuple[ServedDriver, ...]:
        for kind in ("name", "socket", "backend"):
            seen = [getattr(driver, kind) for driver in drivers]
            if len(set(seen)) < len(seen):
                raise ValueError(f"two drivers have the same {kind}")
        return drivers

    @pydantic.model_validator(mode="after")
    def _some_driver(self) -> Self:
        if not (self.drivers or self.drivers_dir):
            raise ValueError(
                "drivers is empty, and there is no drivers_dir to add some: name one as [[drivers]] in the settings "
                "file, or by --driver"
            )
        return self

    @classmethod
    def at_endpoint(cls, given: Mapping[str, Any], endpoint: str) -> dict[str, Any]:
        """`endpoint` is the socket of the one driver that has none."""
        drivers = given.get("drivers", ())
        if not isinstance(drivers, list | tuple):
            return dict(given)  # refused by its type
        sockets = [_socket_of(each) for each in drivers]
        if endpoint in sockets:
            return dict(given)
        if sockets.count("") != 1:
            raise ValueError(
                "CSI_ENDPOINT is set, and it is the socket of the one driver that has no socket: of "
                f"{len(drivers)} drivers {sockets.count('')} have none"
            )
        named = zip(drivers, sockets, strict=True)
        served = [each if socket else {**each, "socket": endpoint} for each, socket in named]
        return {**given, "drivers": tuple(served)}

    check_propagation: bool = True
    """Refuse to start where mounts would not reach the host. False: CO and runtimes live in our mount namespace."""

    handler_grace_s: Annotated[float, Field(ge=0, le=60)] = 3.0
    """After a start, how long a call waits for its handler to register again. Handlers reconnect within a second."""


class ShimSettings(ProgramSettings):
    """`crust shim`."""

    socket: SocketPath
    """The socket that the proxy calls."""

    driver_socket: SocketPath
    """The socket of the wrapped driver."""

    runtime_socket: SocketPath = "/run/crust/runtime.sock"
    """The proxy's Runtime API."""

    csi_profile: CsiProfile = "1.12"
    """1.12: statistics include the volume condition, which CSI 1.13 removed."""

    wrap: bool = True
    """Whether a driver that does not defer by itself is wrapped: its deferred volumes are raw block devices to it."""

    kubelet_root: AbsolutePath = "/var/lib/kubelet"
    """The kubelet's root directory, as the driver's pod has it."""

    defer: Literal["always", "never", "runtime-class"] = "never"
    """How volumes are staged whose context has no crust.dev/defer: as block, unless "never"."""

    check_propagation: bool = True
    """Refuse to start where the driver's mounts would not be seen. False: driver and shim share a mount namespace."""

    controller: bool = False
    """Whether it runs beside the driver's controller, and is called by the CSI sidecars."""

    kubernetes: KubernetesAccess | None = None
    """With `controller`: access to the Kubernetes API, a table of its own. Without it every detach passes."""

    @pydantic.model_validator(mode="after")
    def _controller_wraps(self) -> Self:
        if self.controller and not self.wrap:
            raise ValueError(
                "controller is set, and wrap is not: without wrap it has nothing to do"
            )
        return self


class ClusterSettings(BaseModel):
    """The store through which a central controller and the nodes' drivers speak."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    kind: Literal["etcd"] = "etcd"
    """What the store is."""

    endpoints: Annotated[
        tuple[Annotated[str, Field(pattern=_MEMBER, max_length=261)], ...], Field(min_length=1)
    ]
    """The client addresses of etcd's members."""

    ca: AbsolutePath
    """The certificates, in PEM, of the authorities that signed those of etcd's members."""

    cert: AbsolutePath
    """This process's certificate, in PEM; its common name is its user in etcd."""

    key: AbsolutePath
    """The private key of `cert`, in PEM, without a passphrase."""

    prefix: Annotated[str, Field(pattern=_KEY_PREFIX, max_length=128)] = "/crust/"
    """All keys of the cluster begin so."""

    lease_s: Annotated[int, Field(ge=3, le=300)] = 15
    """How long a node counts as connected, and a controller as leader, after the last renewal that reached etcd."""

    settle_s: Annotated[int, Field(ge=3, le=3600)] = 40
    """How long a controller waits, in an empty store, for all nodes to announce themselves before it creates a new
    name; never less than its `lease_s`. Longer than the longest `lease_s` of a node, and than the 30 s after which a
    node repeats its announcement."""


class RbdSettings(BaseModel):
    """The Ceph pool of `engine = "rbd"`. An administrator makes the pool, the namespace and the users."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    monitors: Annotated[str, Field(min_length=1, max_length=4096)]
    """The monitors' addresses, each with its protocol, as `ceph mon dump` shows them:
    [v2:192.0.2.1:3300,v1:192.0.2.1:6789]."""

    pool: Annotated[str, Field(min_length=1, max_length=128)]
    """The pool, which `rbd pool init` was run for."""

    namespace: Annotated[str, Field(pattern=r"^[^/@]*$", max_length=128)] = ""
    """The namespace of the pool, for this driver alone; empty: the pool's default one."""

    user: Annotated[str, Field(max_length=128)] = ""
    """The user, without `client.`; docs/multi-node.md has the capabilities that it needs. Empty in mode node: the
    user and the key of each volume come with the calls, as secrets."""

    key_file: AbsolutePath | Literal[""] = ""
    """The file with the user's key, or its keyring, which only its owner may read. It belongs to the controller."""

    create_pool: bool = False
    """Whether a first start makes an empty namespace crust's pool."""


LOCAL_ENGINES = frozenset({"files"})
"""The engines whose pool is on one node: only a driver that runs there can make volumes in it."""

_OF_NODE_PART = (
    "create_pool",
    "state_dir",
    "pool_id_file",
    "target_roots",
    "check_propagation",
    "max_volumes",
    "runtime_socket",
    "io_cgroup",
    "ephemeral_grace_s",
)


class DriverSettings(ProgramSettings):
    """`crust driver`."""

    driver_name: Annotated[str, Field(pattern=_DRIVER_NAME)] = OWN_DRIVER
    """The driver's name for the CO. Two drivers of one cluster, of different engines, have different ones; it never
    changes while the driver has volumes."""

    socket: SocketPath
    """The socket that the shim, or a CO, calls."""

    mode: Literal["all", "controller", "node"] = "all"
    """Which part of the driver runs: both, or one of them; the other RPCs are UNIMPLEMENTED then."""

    engine: Literal["files", "rbd"] = "files"
    """What holds the volumes. files: sparse files in `state_dir`, attached by loop devices. rbd: images in the Ceph
    pool of the table `rbd`, which only hypervisors open."""

    rbd: RbdSettings | None = None
    """The Ceph pool, a table of its own."""

    kubernetes: KubernetesAccess | None = None
    """Of a controller of the engine rbd: access to the Kubernetes API, a table of its own. Nodes that have the taint
    node.kubernetes.io/out-of-service are cut off from their images then; else only `crust ceph fence` does that."""

    cluster: ClusterSettings | None = None
    """The cluster with one controller that this is a node of, or the controller; a table of its own."""

    node_deployment: bool = False
    """Whether each node's driver provisions for its own node, called by sidecars with --node-deployment: no attach,
    and NodeExpandVolume grows the volume itself."""

    state_dir: AbsolutePath = "/var/lib/crust/block"
    """The pool: volumes and their records. Survives reboots."""

    create_pool: bool = False
    """Whether a first start makes the pool in `state_dir`. False: `crust driver init-pool` does."""

    pool_id_file: AbsolutePath | Literal[""] = ""
    """Where the id of this node's pool is remembered over reboots, not on the pool's disk; empty: `state_dir` with
    `.pool-id` added."""

    run_dir: AbsolutePath = "/run/crust/driver"
    """State that is invalid after a reboot."""

    node_id: Annotated[str, Field(min_length=1, max_length=256)]
    """This node's name for the CO."""

    target_roots: Annotated[tuple[AbsolutePath, ...], Field(min_length=1)] = ("/var/lib/kubelet",)
    """The driver stages and publishes volumes below these directories."""

    check_propagation: bool = True
    """Refuse to start where mounts would not reach the host. False: the CO lives in our mount namespace."""

    csi_profile: CsiProfile = "1.12"
    """Which health capabilities are advertised."""

    overcommit: Annotated[float, Field(ge=1, le=100)] = 1.0
    """How many times the pool's capacity may be provisioned. 1: every volume can be filled, unless it shares blocks
    with a snapshot."""

    max_volumes: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """How many volumes the node accepts; 0: as many as the kernel's memory, threads and mounts allow."""

    runtime_socket: SocketPath | Literal[""] = ""
    """The proxy's Runtime API, for calls to guests with deferred volumes; empty: the driver cannot call them."""

    io_cgroup: AbsolutePath | Literal[""] = ""
    """The pod cgroup, as a path in its hierarchy; empty: /kubepods.slice or /kubepods."""

    @pydantic.model_validator(mode="after")
    def _remembers_elsewhere(self) -> Self:
        if f"{self.pool_id_file}/".startswith(f"{self.state_dir.rstrip('/')}/"):
            raise ValueError("pool_id_file is inside of state_dir: it would be gone with the pool")
        return self

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
        return self

    @pydantic.model_validator(mode="after")
    def _fits_the_cluster(self) -> Self:
        if self.cluster is None:
            return self
        if self.mode == "all":
            raise ValueError(
                "cluster is set, and mode is all: a node of a cluster has mode node, its controller mode controller"
            )
        if self.engine not in LOCAL_ENGINES:
            raise ValueError(
                f"cluster is set, and the engine {self.engine} is reached from each node: leave cluster out"
            )
        if self.mode == "controller" and "overcommit" in self.model_fields_set:
            raise ValueError(
                "overcommit is set, and mode is controller of a cluster: each node counts its own pool, set it there"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _fits_the_mode(self) -> Self:
        if self.node_deployment and self.mode != "all":
            raise ValueError(
                f"node_deployment is set, and mode is {self.mode}: each node's driver is its own controller"
            )
        if self.mode == "node" and self.engine in LOCAL_ENGINES and self.cluster is None:
            raise ValueError(
                f"mode is node, and the engine {self.engine} has its pool here: no controller reaches it without "
                "cluster, and nobody can create a volume; set cluster, or mode all"
            )
        if self.mode != "controller":
            return self
        if self.engine in LOCAL_ENGINES and self.cluster is None:
            raise ValueError(
                f"mode is controller, and the engine {self.engine} has its pool on a node: set cluster, to reach the "
                "nodes through it, or mode all on each node, with node_deployment"
            )
        if alien := [name for name in _OF_NODE_PART if name in self.model_fields_set]:
            raise ValueError(
                f"mode is controller, and {', '.join(alien)} is of the node part: leave it out"
            )
        return self

    modify_window_s: Annotated[float, Field(ge=0, le=10)] = 0.1
    """How long a change of a volume waits for more changes of the same volume, to coalesce them: a CO's sidecars send
    them one by one."""

    ephemeral_grace_s: Annotated[float, Field(ge=60, le=30 * 86400)] = 3600
    """How long an inline ephemeral volume may be neither attached nor published before it is deleted."""


def _socket_of(driver: Any) -> str:
    """Of a driver that is not checked yet; what is no table has something, to be refused for."""
    return str(driver.get("socket") or "") if isinstance(driver, Mapping) else "?"


Settings = TypeVar("Settings", bound=ProgramSettings)


def load(
    model: type[Settings],
    program: str,
    *,
    toml: str = "",
    environ: Mapping[str, str],
    flags: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> Settings:
    """Merge the sources and check the result; flags that are None were not given. Raises `InvalidSettings`.

    `toml` is the file's text. Environment variables are CRUST_<SETTING> for simple values, comma-separated for lists;
    nested settings come from the file or from flags. CSI_ENDPOINT, with or without `unix://`, is the CSI socket (CSI
    "Packaging"), stronger than the file alone. `defaults` are weaker than any source: what only the machine knows.
    """
    try:
        merged = {**(defaults or {}), **tomllib.loads(toml)}
    except tomllib.TOMLDecodeError as err:
        raise InvalidSettings(program, f"the settings file is not TOML: {err}") from err
    own = _from_environment(model, program, environ)
    own |= {name: value for name, value in flags.items() if value is not None}
    merged |= own
    try:
        if environ.get("CSI_ENDPOINT") and "socket" not in own:
            merged = model.at_endpoint(merged, _path(environ["CSI_ENDPOINT"]))
        return model.model_validate(merged)
    except pydantic.ValidationError as err:
        raise InvalidSettings(program, reasons(err)) from err
    except ValueError as err:
        raise InvalidSettings(program, str(err)) from err


def _path(endpoint: str) -> str:
    """The path of CSI_ENDPOINT, which may begin with unix:// or unix: and may lack nothing else."""
    path = endpoint.removeprefix("unix:")
    path = "/" + path.lstrip("/") if path.startswith("//") else path
    if not path.startswith("/"):
        raise ValueError(
            f"CSI_ENDPOINT is {endpoint[:128]!r}: it must be the path of a UNIX socket, e.g. unix:///run/csi/csi.sock"
        )
    return path


def _from_environment(
    model: type[BaseModel], program: str, environ: Mapping[str, str]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, text in environ.items():
        name = key.removeprefix(ENVIRONMENT_PREFIX).lower()
        if not key.startswith(ENVIRONMENT_PREFIX) or _SERVICE_LINK.search(key):
            continue
        field = model.model_fields.get(name)
        if field is None:
            near = difflib.get_close_matches(name, model.model_fields, n=1)
            meant = f"; did you mean {ENVIRONMENT_PREFIX}{near[0].upper()}?" if near else ""
            raise InvalidSettings(
                program, f"there is no setting for the environment's {key}{meant}"
            )
        is_list = "tuple" in str(field.annotation)
        found[name] = tuple(part for part in text.split(",") if part) if is_list else text
    return found


def reasons(err: pydantic.ValidationError) -> str:
    """What is wrong with which setting, without its value."""
    lines = err.errors(include_url=False, include_input=False)
    found = ((".".join(map(str, each["loc"])), _sentence(each)) for each in lines)
    return "; ".join(f"{place} {why}" if place else why for place, why in found)


_SENTENCES = {
    "missing": "is missing",
    "extra_forbidden": "is no setting",
    "model_type": "must be a table",
    "dict_type": "must be a table",
    "tuple_type": "must be a list",
    "too_short": "is empty, and needs at least one",
}
"""Why a value is refused, by pydantic's name for it."""


def _sentence(line: Any) -> str:
    match line["type"]:
        case "string_pattern_mismatch":
            return f"must be {_MEANT[line['ctx']['pattern']]}"
        case "string_too_long":
            return f"is longer than {line['ctx']['max_length']} bytes"
        case "value_error":
            return str(line["ctx"]["error"])
    return _SENTENCES.get(line["type"], str(line["msg"]).replace("Input should be", "must be"))
