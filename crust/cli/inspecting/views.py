"""What operators see of drivers, handlers and deferred volumes: rows, made from the answers of the proxy.

The names of a row's fields are the keys of `-o json`, and stay (docs/api.md).
"""

import datetime
import re
from dataclasses import dataclass

from google.protobuf.timestamp_pb2 import Timestamp

from crust.cli.output import BAD, BUSY, GOOD, Column, age
from crust.wire.v1 import handlers_pb2, inspect_pb2

_POD = re.compile(r"/pods/([^/]+)/")
_PV = re.compile(r"/kubernetes\.io~csi/([^/]+)/")

_UNITS = ("", "Ki", "Mi", "Gi", "Ti")

_STATES = {
    "ready": GOOD,
    "mounted": GOOD,
    "registered": GOOD,
    "claimed": BUSY,
    "waiting": BUSY,
    "not-ready": BAD,
    "refused": BAD,
    "error": BAD,
    "unreadable": BAD,
}


@dataclass(frozen=True, slots=True)
class Driver:
    """A CSI driver that the proxy serves. `message`: why it is not ready.

    `shim_version` is empty without a shim, and of one that does not say it.
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


@dataclass(frozen=True, slots=True)
class Handler:
    """A registered runtime handler."""

    name: str
    version: str
    endpoint: str
    filesystems: tuple[str, ...]
    features: tuple[str, ...]
    max_volumes_per_sandbox: int
    registered_at: datetime.datetime

    @classmethod
    def of(cls, answer: inspect_pb2.ListHandlersResponse.Handler) -> "Handler":
        """As the proxy answered."""
        found = answer.registration
        return cls(
            name=found.name,
            version=found.version,
            endpoint=found.endpoint,
            filesystems=tuple(found.filesystems),
            features=tuple(map(_feature, found.features)),
            max_volumes_per_sandbox=found.max_volumes_per_sandbox,
            registered_at=answer.registered_at.ToDatetime(datetime.UTC),
        )


@dataclass(frozen=True, slots=True)
class Volume:
    """A deferred volume at one target. Of an entry that cannot be read, `entry`, `state` and `message` alone."""

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

    @classmethod
    def of(cls, answer: inspect_pb2.DeferredVolume) -> "Volume":
        """As the proxy answered. Pod and PersistentVolume are those of a kubelet's target path."""
        return cls(
            volume_id=answer.volume_id,
            driver=answer.driver,
            target_path=answer.target_path,
            pod_uid=_first(_POD, answer.target_path),
            pv=_first(_PV, answer.target_path),
            handler=answer.handler,
            device=answer.device,
            fs_type=answer.fs_type,
            readonly=answer.readonly,
            capacity_bytes=answer.capacity_bytes,
            state=answer.state,
            sandbox_id=answer.sandbox_id,
            claimed_by_pid=answer.claimed_by_pid,
            claimed_at=_time(answer.claimed_at) if answer.HasField("claimed_at") else None,
            published_at=_time(answer.published_at) if answer.HasField("published_at") else None,
            decided_by=answer.decided_by,
            entry=answer.entry,
            message=answer.message,
            request_id=answer.request_id,
        )

    @property
    def name(self) -> str:
        """What `crust describe` finds it by."""
        return self.volume_id or self.entry


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not ready. `message`: what, why, and what to do."""

    part: str
    error_name: str
    message: str


DRIVERS = (
    Column[Driver]("name", lambda row: row.name),
    Column[Driver]("state", lambda row: row.state, styles=_STATES),
    Column[Driver]("registration", lambda row: row.registration, styles=_STATES),
    Column[Driver]("deferred", lambda row: str(row.deferred_volumes)),
    Column[Driver]("version", lambda row: row.version, wide=True),
    Column[Driver]("shim", lambda row: row.shim_version, wide=True),
    Column[Driver]("socket", lambda row: row.socket, wide=True),
    Column[Driver]("backend", lambda row: row.backend, wide=True),
    Column[Driver]("message", lambda row: row.message),
)

DRIVERS_OF_STATUS = DRIVERS[:-1]
"""What is wrong with one is among the problems above them."""

HANDLERS = (
    Column[Handler]("name", lambda row: row.name),
    Column[Handler]("version", lambda row: row.version),
    Column[Handler]("filesystems", lambda row: ",".join(row.filesystems)),
    Column[Handler]("features", lambda row: ",".join(row.features)),
    Column[Handler]("age", lambda row: _age(row.registered_at)),
    Column[Handler]("endpoint", lambda row: row.endpoint, wide=True),
    Column[Handler]("max", lambda row: str(row.max_volumes_per_sandbox or ""), wide=True),
)

VOLUMES = (
    Column[Volume]("volume", lambda row: row.name),
    Column[Volume]("driver", lambda row: row.driver),
    Column[Volume]("handler", lambda row: row.handler),
    Column[Volume]("state", lambda row: row.state, styles=_STATES),
    Column[Volume]("sandbox", lambda row: row.sandbox_id),
    Column[Volume]("size", lambda row: size(row.capacity_bytes)),
    Column[Volume]("access", lambda row: access(row)),
    Column[Volume]("age", lambda row: _age(row.published_at)),
    Column[Volume]("pv", lambda row: row.pv, wide=True),
    Column[Volume]("pod", lambda row: row.pod_uid, wide=True),
    Column[Volume]("device", lambda row: row.device, wide=True),
    Column[Volume]("fs", lambda row: row.fs_type, wide=True),
    Column[Volume]("pid", lambda row: str(row.claimed_by_pid or ""), wide=True),
    Column[Volume]("request", lambda row: row.request_id, wide=True),
    Column[Volume]("target", lambda row: row.target_path, wide=True),
    Column[Volume]("message", lambda row: row.message),
)

PROBLEMS = (
    Column[Problem]("part", lambda row: row.part),
    Column[Problem]("error", lambda row: row.error_name),
    Column[Problem]("message", lambda row: row.message),
)

WARNINGS = (PROBLEMS[0], PROBLEMS[2])


def now() -> datetime.datetime:
    """What ages are counted to."""
    return datetime.datetime.now(datetime.UTC)


def size(count: int) -> str:
    """Bytes in the unit that keeps the number below 1024: 512Mi, 1.5Gi."""
    power = min(max(count.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    number = f"{count / 1024**power:.1f}".removesuffix(".0")
    return number + _UNITS[power] if count else ""


def access(row: Volume) -> str:
    """Read-only or writable; nothing if it is not known."""
    if not row.volume_id:
        return ""
    return "ro" if row.readonly else "rw"


def _feature(number: "handlers_pb2.HandlerFeature.ValueType") -> str:
    name = handlers_pb2.HandlerFeature.Name(number)
    return name.removeprefix("HANDLER_FEATURE_")


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1] if found else ""


def _time(stamp: Timestamp) -> datetime.datetime:
    return stamp.ToDatetime(datetime.UTC)


def _age(since: datetime.datetime | None) -> str:
    return age(since, now())
