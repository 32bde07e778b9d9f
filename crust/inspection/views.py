"""The rows that operators see of drivers, handlers and deferred volumes, made from the proxy's answers.

The names of a row's fields are the keys of `-o json`, and stay (docs/api.md).
"""

import dataclasses
import datetime
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

import crust
from crust.core.settings import OWN_DRIVER
from crust.inspection.output import BAD, BUSY, GOOD, Column, age
from crust.wire.v1 import handlers_pb2, inspect_pb2

Row = TypeVar("Row")
_POD = re.compile(r"/pods/([^/]+)/")
_PV = re.compile(r"/kubernetes\.io~csi/([^/]+)/")

NOT_RESTARTED = "it was not restarted since the upgrade"
RESTART = "restart it: first the runtimes, then the proxy, then shims, then the driver"

_UNITS = ("", "Ki", "Mi", "Gi", "Ti")

STATES = {
    **dict.fromkeys(("ready", "mounted", "registered"), GOOD),
    **dict.fromkeys(("claimed", "waiting", "low", "unused"), BUSY),
    **dict.fromkeys(("closed", "full", "not-ready", "refused", "error", "unreadable"), BAD),
}


@dataclass(frozen=True, slots=True)
class Pool:
    """The space of a pool, in bytes. Operators are warned when less than `low_bytes` is free."""

    size_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    free_bytes: int
    low_bytes: int
    conditions: tuple["Problem", ...] = ()
    """The problems of the driver's process that fail no Probe."""
    thick: bool = False
    """Whether a volume whose class names no kind is thick."""
    name: str = ""
    problem: str = ""
    """Why it is not served, while another pool of the driver is."""
    further: tuple["Pool", ...] = ()
    """The driver's other pools."""

    @property
    def state(self) -> str:
        """`closed`: it is not served.
        `full`: of the disk itself less is left than half of the least part that the driver never gives to volumes.
        `low`: operators are to be warned.
        """
        if self.problem:
            return "closed"
        if self.size_bytes - self.allocated_bytes < self.size_bytes // 200:
            return "full"
        return "low" if self.free_bytes < self.low_bytes else "ready"


@dataclass(frozen=True, slots=True)
class DriverRow:
    """A CSI driver that the proxy serves. `message`: why it is not ready, with the error's name in front.

    `shim_version` is empty without a shim, and if the shim does not report it.
    """

    name: str
    socket: str
    backend: str
    state: str
    version: str
    registration: str
    deferred_volumes: int
    message: str
    shim_version: str = ""
    pool: Pool | None = None
    error_name: str = ""


@dataclass(frozen=True, slots=True)
class PoolRow:
    """One pool of a driver. `name`: the driver's, with the name of a further pool, as metrics have it."""

    driver: str
    name: str
    pool: Pool


def pools_of(drivers: Iterable[DriverRow]) -> Iterator[PoolRow]:
    for driver in drivers:
        if driver.pool is not None:
            yield PoolRow(driver.name, driver.name, dataclasses.replace(driver.pool, further=()))
            for pool in driver.pool.further:
                yield PoolRow(driver.name, f"{driver.name}/{pool.name}", pool)


@dataclass(frozen=True, slots=True)
class HandlerRow:
    name: str
    version: str
    endpoint: str
    filesystems: tuple[str, ...]
    features: tuple[str, ...]
    max_volumes_per_sandbox: int
    registered_at: datetime.datetime
    message: str = ""
    """Why the proxy cannot call it."""

    @classmethod
    def of(cls, answer: inspect_pb2.ListHandlersResponse.Handler) -> "HandlerRow":
        return row(
            cls,
            answer.registration,
            features=tuple(
                handlers_pb2.HandlerFeature.Name(number).removeprefix("HANDLER_FEATURE_")
                for number in answer.registration.features
            ),
            registered_at=answer.registered_at.ToDatetime(datetime.UTC),
            message=answer.message,
        )


@dataclass(frozen=True, slots=True)
class VolumeRow:
    """A deferred volume at one target. An unreadable entry has only `entry`, `state` and `message`."""

    volume_id: str
    driver: str
    target_path: str
    pod_uid: str
    pv: str
    handler: str
    device: str
    fs_type: str
    readonly: bool
    capacity_bytes: int
    state: str
    sandbox_id: str
    claimed_by_pid: int
    claimed_at: datetime.datetime | None
    published_at: datetime.datetime | None
    decided_by: str
    entry: str
    message: str
    request_id: str = ""
    pod: str = ""
    """Namespace and name; empty if the CO does not send them."""

    @classmethod
    def of(cls, answer: inspect_pb2.DeferredVolume) -> "VolumeRow":
        """The row of the proxy's answer, with pod and PersistentVolume from a kubelet's target path."""
        target = answer.target_path
        volume = _PV.search(target)
        return row(cls, answer, pod_uid=pod_of(target), pv=volume[1] if volume else "")

    @property
    def name(self) -> str:
        """The name that `crust volumes -o name` prints."""
        return self.volume_id or self.entry

    @property
    def is_orphaned(self) -> bool:
        """Whether the volume's sandbox is lost to its runtime, by the runtime's report."""
        from crust.handoff import claims  # imports pydantic, which would slow down every command

        return self.state == claims.State.ERROR.value and self.message.startswith(claims.ORPHANED)

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which `crust describe` finds the volume; the pod's with and without its namespace."""
        pod = (self.pod, self.pod.partition("/")[2], self.pod_uid)
        return (self.volume_id, self.target_path, self.entry, self.pv, *pod)


@dataclass(frozen=True, slots=True)
class Problem:
    """A component that is not ready. `message`: the problem, its reason and its remedy."""

    component: str
    error_name: str
    message: str


@dataclass(frozen=True, slots=True)
class ProxyAnswer:
    """The answer of a running proxy about itself and its node."""

    version: str
    drivers: tuple[DriverRow, ...]
    handlers: tuple[HandlerRow, ...]
    problems: tuple[Problem, ...]
    volumes: tuple[VolumeRow, ...] = ()
    warnings: tuple[Problem, ...] = ()
    """Conditions of the proxy that are shown, while it is ready."""


DRIVERS = (
    Column("name"),
    Column("state", styles=STATES),
    Column("registration", styles=STATES),
    Column("deferred", "deferred_volumes"),
    Column("version", wide=True),
    Column("shim", "shim_version", wide=True),
    Column("socket", wide=True),
    Column("backend", wide=True),
    Column("message"),
)

POOLS = (
    Column("driver", "name"),
    Column("pool", lambda row: row.pool.state, styles=STATES),
    Column("size", lambda row: size(row.pool.size_bytes)),
    Column("allocated", lambda row: size(row.pool.allocated_bytes)),
    Column("reserved", lambda row: size(row.pool.reserved_bytes)),
    Column("free", lambda row: size(row.pool.free_bytes)),
    Column("default", lambda row: provisioning(row.pool)),
)
"""Of `PoolRow`."""

HANDLERS = (
    Column("name"),
    Column("version"),
    Column("filesystems"),
    Column("features"),
    Column("age", lambda row: age(row.registered_at, now())),
    Column("endpoint", wide=True),
    Column("max", lambda row: str(row.max_volumes_per_sandbox or ""), wide=True),
    Column("message"),
)

VOLUMES = (
    Column("pv", lambda row: row.pv or row.name),
    Column("pod", lambda row: row.pod or row.pod_uid),
    Column("driver"),
    Column("handler"),
    Column("state", styles=STATES),
    Column("sandbox", "sandbox_id"),
    Column("size", lambda row: size(row.capacity_bytes)),
    Column("access", lambda row: access(row)),
    Column("age", lambda row: age(row.published_at, now())),
    Column("volume", "volume_id", wide=True),
    Column("pod-uid", "pod_uid", wide=True),
    Column("device", wide=True),
    Column("fs", "fs_type", wide=True),
    Column("pid", lambda row: str(row.claimed_by_pid or ""), wide=True),
    Column("request", "request_id", wide=True),
    Column("target", "target_path", wide=True),
    Column("message"),
)

PROBLEMS = (Column("component"), Column("error", "error_name"), Column("message"))

WARNINGS = (PROBLEMS[0], PROBLEMS[2])


def versions(answer: ProxyAnswer) -> Mapping[str, str]:
    """The version of each daemon of crust; empty if it is too old to report it. Only our own drivers are listed."""
    by_daemon = {"the proxy": answer.version}
    for driver in answer.drivers:
        if driver.shim_version:
            by_daemon[f"the shim of driver {driver.name}"] = driver.shim_version
        if driver.name == OWN_DRIVER and driver.version:
            by_daemon[f"driver {driver.name}"] = driver.version
    return by_daemon


def outdated(answer: ProxyAnswer) -> Iterator[Problem]:
    """The daemons with another version than this command: they were not restarted since an upgrade."""
    for name, version in versions(answer).items():
        if version != crust.__version__:
            yield Problem(name, "", f"{other_version(version)}: {NOT_RESTARTED}; {RESTART}")


def other_version(version: str) -> str:
    return f"runs {version or 'an older version'}, installed is {crust.__version__}"


def pool_problems(drivers: Iterable[DriverRow], state: str) -> Iterator[Problem]:
    """A problem for each pool in the state: `full` is one of its medium, and `low` a warning."""
    for row in pools_of(drivers):
        pool, whole = row.pool, size(row.pool.size_bytes)
        messages = {
            "full": f"{size(pool.allocated_bytes)} of {whole} are allocated: writes of its volumes fail, or will "
            "soon; delete snapshots or other files, or enlarge the pool",
            "low": f"{size(pool.free_bytes) or 'nothing'} of {whole} is free for new volumes; delete volumes or "
            "snapshots, or enlarge the pool: `crust pool` shows its volumes",
        }
        if pool.state == state:
            yield Problem(f"pool of driver {row.name}", "", messages[state])


def unreadable(volumes: Iterable[VolumeRow]) -> Iterator[Problem]:
    """A problem for each entry of the handoff directory that cannot be read."""
    for entry in volumes:
        if entry.state == "unreadable":
            yield Problem(f"entry {entry.entry}", "", entry.message)


def pod_of(target: str) -> str:
    """The UID of the pod of a kubelet's target path; empty for another path."""
    pod = _POD.search(target)
    return pod[1] if pod else ""


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def size(count: int) -> str:
    """Bytes in the unit that keeps the number below 1024: 512Mi, 1.5Gi."""
    power = min(max(count.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    number = f"{count / 1024**power:.1f}".removesuffix(".0")
    return number + _UNITS[power] if count else ""


def provisioning(row: Any) -> str:
    """The kind of a volume of a pool, or of those whose class names none."""
    return "thick" if row.thick else "thin"


def access(row: VolumeRow) -> str:
    """`ro` or `rw`; empty if it is not known."""
    if not row.volume_id:
        return ""
    return "ro" if row.readonly else "rw"


def row(kind: type[Row], answer: Message, **fields: object) -> Row:
    """A row with the message's fields of the same names: moments as such, lists as tuples."""
    names = {field.name for field in dataclasses.fields(cast("Any", kind))} - fields.keys()
    for name in names:
        value = getattr(answer, name)
        described = answer.DESCRIPTOR.fields_by_name[name]
        if described.message_type is not None:
            value = value.ToDatetime(datetime.UTC) if answer.HasField(name) else None
        fields[name] = tuple(value) if described.is_repeated else value
    return kind(**fields)
