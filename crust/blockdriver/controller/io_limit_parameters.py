"""The I/O limits of a volume, as parameters of a VolumeAttributesClass or a StorageClass.

Four keys, each a number per second: `readIOPS`, `writeIOPS`, `readBytesPerSecond`, `writeBytesPerSecond`. A key that
is not named keeps its value (CSI ControllerModifyVolume), which for a new volume is no limit; 0 removes a limit. So a
class that omits a key keeps the value of an earlier class: classes between which volumes move must name all four.

Numbers are written as elsewhere in Kubernetes: 3000, 3k, 64Ki, 10Mi. They have a minimum: at a few bytes per second
the unmount of the volume would take days.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from crust import errors, quantities, volumes

_SIDECARS = "csi.storage.k8s.io/"


@dataclass(frozen=True, slots=True)
class _Range:
    name: str
    least: int
    most: int


_IOPS = (10, 10**9)
_BYTES = (64 * 1024, 10**15)
_RANGES = {
    "readIOPS": _Range("read_iops", *_IOPS),
    "writeIOPS": _Range("write_iops", *_IOPS),
    "readBytesPerSecond": _Range("read_bytes_per_second", *_BYTES),
    "writeBytesPerSecond": _Range("write_bytes_per_second", *_BYTES),
}
KEYS = tuple(_RANGES)

Changes = tuple[tuple[str, int], ...]
"""Fields of `IoLimits` and their new values, in order of the fields' names."""


class UnknownMutableParameter(errors.InvalidRequest):
    """A mutable parameter that this driver does not know."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"the mutable parameter {key[:128]!r} is not known",
            why=f"this driver knows {', '.join(KEYS)}",
            hint="correct the VolumeAttributesClass; nothing was changed",
        )
        self.key = key


class InvalidIoLimit(errors.InvalidRequest):
    """A limit that is not a number, or is out of range."""

    def __init__(self, key: str, value: str, least: int, most: int) -> None:
        super().__init__(
            f"the parameter {key} cannot be {value[:64]!r}",
            why=f"it must be 0 (no limit) or from {least} to {most} per second, such as 3000 or 64Mi",
            hint="correct the class; nothing was changed",
        )
        self.key = key


def parse(mutable_parameters: Mapping[str, str]) -> Changes:
    """The changes; keys of sidecars are ignored. Raises `UnknownMutableParameter`, `InvalidIoLimit`."""
    for key in mutable_parameters:
        if key not in _RANGES and not key.startswith(_SIDECARS):
            raise UnknownMutableParameter(key)
    return among(mutable_parameters)


def among(parameters: Mapping[str, str]) -> Changes:
    """The limits among other parameters. Raises `InvalidIoLimit`."""
    found = {key: parameters[key] for key in KEYS if key in parameters}
    return tuple(sorted((_RANGES[key].name, _number(key, text)) for key, text in found.items()))


def changed(limits: volumes.IoLimits, changes: Changes) -> volumes.IoLimits:
    """`limits` with `changes` applied."""
    return replace(limits, **dict(changes))


def _number(key: str, text: str) -> int:
    range_ = _RANGES[key]
    number = quantities.parse(text)
    if number == 0 or (number is not None and range_.least <= number <= range_.most):
        return number
    raise InvalidIoLimit(key, text, range_.least, range_.most)
