"""The size of a new volume: never less than required, never more than the limit, rounded up.

Sizes are whole mebibytes if the limit allows, else whole 512-byte sectors, because a loop device shows only whole
sectors.
"""

from collections.abc import Iterable

from crust import errors, volumes
from crust.host.filesystems import mkfs

MIB = 1024 * 1024
SECTOR_BYTES = 512
DEFAULT_BYTES = 1024 * MIB
"""The size for a request without one, if its limit allows."""

_RAW_MINIMUM_BYTES = MIB


class VolumeSizeNotPossible(errors.OutOfRange):
    """No size satisfies both the request and the pool."""

    def __init__(self, why: str) -> None:
        super().__init__(
            "a volume of that size is not possible",
            why=why,
            hint="change the requested size or its limit",
        )


def minimum_bytes(fs_types: Iterable[str]) -> int:
    """The smallest size for a volume that may carry any of `fs_types`; a raw one needs one mebibyte."""
    return max((mkfs.minimum_bytes(each) for each in fs_types), default=_RAW_MINIMUM_BYTES)


def choose(wanted: volumes.CapacityRange, *, minimum: int, maximum: int) -> int:
    """The size in bytes for a new volume; raises `VolumeSizeNotPossible`."""
    limit = wanted.limit_bytes or maximum
    base = max(wanted.required_bytes or min(DEFAULT_BYTES, limit), minimum)
    size = _round_up(base, MIB)
    if size > limit:
        size = _round_up(base, SECTOR_BYTES)
    if size > limit:
        raise VolumeSizeNotPossible(
            f"at least {size} bytes are needed and at most {limit} are allowed"
        )
    if size > maximum:
        raise VolumeSizeNotPossible(f"{size} bytes exceed the largest possible volume, {maximum}")
    return size


def satisfies(size_bytes: int, wanted: volumes.CapacityRange) -> bool:
    """Whether an existing volume of `size_bytes` satisfies `wanted`."""
    if size_bytes < wanted.required_bytes:
        return False
    return not wanted.limit_bytes or size_bytes <= wanted.limit_bytes


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
