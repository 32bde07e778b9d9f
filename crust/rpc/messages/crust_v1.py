"""The codec of crust.v1: converts its messages to core types and back.

Decoded values come from another process, and statistics from a guest, which may be hostile: so it checks sizes.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from crust.core import credentials, errors, volumes
from crust.wire.csi.v1 import csi_pb2
from crust.wire.v1 import handlers_pb2, types_pb2

LONGEST_FREEZE_S = 60

USAGES_MAX = 8
"""Of one volume. There are two units, bytes and inodes."""

FILESYSTEMS_MAX = 64
"""Of one handler."""

VERSION_MAX_CHARS = 128

Usage = TypeVar("Usage", types_pb2.VolumeUsage, csi_pb2.VolumeUsage)

_FILESYSTEM = re.compile(r"[a-z0-9]{1,32}")
_KERNEL = re.compile(r"(?=.{0,64}$)([0-9]{1,4}\.[0-9]{1,4}[!-~]*)?")


class ImplausibleStats(errors.RuntimeFailed):
    def __init__(self, why: str) -> None:
        super().__init__("the runtime's volume statistics are impossible", why=why)


class InvalidRegistration(errors.InvalidRequest):
    def __init__(self, why: str) -> None:
        super().__init__("the runtime handler cannot be registered", why=why)


@dataclass(frozen=True, slots=True)
class RegisterRequest:
    """A handler's name and features. `endpoint` is the path of the socket on which it serves RuntimeHandler."""

    name: volumes.HandlerName
    version: str
    endpoint: str
    filesystems: Collection[str]
    features: Collection[volumes.HandlerFeature] = frozenset()
    max_volumes_per_sandbox: int = 0
    """0: no limit. The proxy refuses more for one pod."""
    max_target_path_bytes: int = 0
    """0: no limit. The proxy refuses a longer path."""
    guest_kernel: str = ""
    """The oldest kernel of its sandboxes; empty: not known."""


def registration(request: handlers_pb2.RegisterRequest) -> RegisterRequest:
    """Decode and check a request; raises `InvalidRegistration`. Ignores unknown features, and the endpoint."""
    try:
        name = volumes.HandlerName(request.name)
    except errors.InvalidRequest as error:
        raise InvalidRegistration(f"{error.what}: {error.why}") from error
    if types_pb2.VolumeType.BLOCK not in request.volume_types:
        raise InvalidRegistration("volume_types lacks BLOCK, the only type that is published")
    if (number := len(request.filesystems)) > FILESYSTEMS_MAX:
        raise InvalidRegistration(f"it has {number} filesystems, and {FILESYSTEMS_MAX} is the most")
    bad = [name for name in request.filesystems if not _FILESYSTEM.fullmatch(name)]
    if bad or not request.filesystems:
        why = f"filesystems holds {bad[0][:32]!r}" if bad else "filesystems is empty"
        raise InvalidRegistration(why)
    if request.max_volumes_per_sandbox < 0:
        raise InvalidRegistration("max_volumes_per_sandbox is negative")
    if request.max_target_path_bytes < 0:
        raise InvalidRegistration("max_target_path_bytes is negative")
    if not _KERNEL.fullmatch(request.guest_kernel):
        raise InvalidRegistration(f"guest_kernel is {request.guest_kernel[:64]!r}")
    features = {feature.value: feature for feature in volumes.HandlerFeature}
    return RegisterRequest(
        name=name,
        version=request.version[:VERSION_MAX_CHARS],
        endpoint=request.endpoint,
        filesystems=frozenset(request.filesystems),
        features=frozenset(features[number] for number in request.features if number in features),
        max_volumes_per_sandbox=request.max_volumes_per_sandbox,
        max_target_path_bytes=request.max_target_path_bytes,
        guest_kernel=request.guest_kernel,
    )


def registration_to_wire(value: RegisterRequest) -> handlers_pb2.RegisterRequest:
    return handlers_pb2.RegisterRequest(
        name=value.name,
        version=value.version,
        endpoint=value.endpoint,
        volume_types=[types_pb2.VolumeType.BLOCK],
        filesystems=sorted(value.filesystems),
        features=sorted(
            handlers_pb2.HandlerFeature.ValueType(feature.value) for feature in value.features
        ),
        max_volumes_per_sandbox=value.max_volumes_per_sandbox,
        max_target_path_bytes=value.max_target_path_bytes,
        guest_kernel=value.guest_kernel,
    )


class HandlerNameTaken(errors.Conflict):
    def __init__(self, name: str, endpoint: str) -> None:
        super().__init__(
            f"runtime handler {name!r} is registered already",
            why=f"the registered handler serves on {endpoint}",
        )


def stats(
    usages: Sequence[types_pb2.VolumeUsage], reported: types_pb2.VolumeCondition | None
) -> volumes.VolumeStats:
    """Decode a statistics answer; raises `ImplausibleStats`."""
    if len(usages) > USAGES_MAX:
        raise ImplausibleStats(f"{len(usages)} lines of usage, and {USAGES_MAX} is the most")
    lines = []
    for pb in usages:
        numbers = (pb.total, pb.used, pb.available)
        # used and available may each equal the total; their sum may be less (reserved blocks)
        if pb.unit not in (1, 2) or min(numbers) < 0 or max(pb.used, pb.available) > pb.total:
            shown = f"total {pb.total}, used {pb.used}, available {pb.available}, unit {pb.unit}"
            raise ImplausibleStats(shown)
        lines.append(volumes.VolumeUsage(volumes.UsageUnit(pb.unit), *numbers))
    return volumes.VolumeStats(tuple(lines), None if reported is None else condition(reported))


def usages_to_wire(value: volumes.VolumeStats, kind: type[Usage]) -> Sequence[Usage]:
    """Encode the usage of a statistics answer, in CSI's message or in that of crust.v1."""
    return [kind(**{**asdict(line), "unit": line.unit.value}) for line in value.usage]


def condition(pb: types_pb2.VolumeCondition) -> volumes.VolumeCondition:
    """Decode a condition, whose text is cut."""
    return volumes.VolumeCondition(pb.abnormal, pb.message[: credentials.SHOWN_MAX_CHARS])


def condition_to_wire(value: volumes.VolumeCondition | None) -> types_pb2.VolumeCondition | None:
    if value is None:
        return None
    return types_pb2.VolumeCondition(abnormal=value.abnormal, message=value.message)


def capacity_range_to_wire(value: volumes.CapacityRange) -> types_pb2.CapacityRange:
    return types_pb2.CapacityRange(
        required_bytes=value.required_bytes, limit_bytes=value.limit_bytes
    )


def thaw_after_s(seconds: int) -> int:
    """Check a freeze's time limit; raises `errors.InvalidRequest`."""
    if not 1 <= seconds <= LONGEST_FREEZE_S:
        raise errors.InvalidRequest(
            f"thaw_after_seconds {seconds} is invalid",
            why=f"it must be from 1 to {LONGEST_FREEZE_S}",
            hint="a guest never stays frozen longer; repeat the freeze if more time is needed",
        )
    return seconds


def io_limits(pb: types_pb2.IoLimits | csi_pb2.DeferredMount.IoLimits) -> volumes.IoLimits:
    """Decode limits; raises `errors.InvalidRequest` for values that no kernel and no hypervisor accepts."""
    value = volumes.IoLimits(
        pb.read_iops, pb.write_iops, pb.read_bytes_per_second, pb.write_bytes_per_second
    )
    for name, limit in asdict(value).items():
        if limit < 0:  # the wire has no more than 63 bits
            raise errors.InvalidRequest(
                "the I/O limits are invalid", why=f"{name} is {limit}", hint="0 is no limit"
            )
    return value


def io_limits_to_wire(value: volumes.IoLimits) -> types_pb2.IoLimits:
    return types_pb2.IoLimits(**asdict(value))
