"""The keys by which a volume says how it is deferred: the only place that spells them.

A StorageClass has them as parameters; CreateVolume answers them in the volume context, which every later call
has. A PersistentVolume that a person made has them as volumeAttributes. Proxy, shim and driver read the same keys.
"""

import enum
from collections.abc import Mapping

from crust import errors, volumes

PREFIX = "crust.dev/"
"""No other driver's key begins with it: a shim removes these keys from what a wrapped driver is sent."""

DEFER = "crust.dev/defer"
RUNTIME_HANDLER = "crust.dev/runtime-handler"
CREATED_EMPTY = "crust.dev/created-empty"
"""True: nobody has written the volume but the kernels it was published to; the guest may format it if it is blank."""
EXT4_BYTES_PER_INODE = "crust.dev/ext4-bytes-per-inode"
EXT4_RESERVED_PERCENT = "crust.dev/ext4-reserved-percent"


class Defer(enum.Enum):
    """The values of `DEFER`."""

    ALWAYS = "always"
    NEVER = "never"
    RUNTIME_CLASS = "runtime-class"
    """The RuntimeClass of each pod decides."""


class InvalidDeferKey(errors.InvalidRequest):
    """One of the keys has a value that it cannot have."""

    def __init__(self, key: str, value: str, allowed: str) -> None:
        super().__init__(
            f"whether and how to defer the mount cannot be decided: {key} is {value[:64]!r}",
            why=f"it must be {allowed}",
            hint="correct the StorageClass and create the volume again, or correct volumeAttributes",
        )
        self.key = key


def defer(context: Mapping[str, str]) -> Defer | None:
    """What the volume says; None if it says nothing. Raises `InvalidDeferKey`."""
    value = context.get(DEFER)
    if value is None:
        return None
    try:
        return Defer(value)
    except ValueError:
        allowed = ", ".join(each.value for each in Defer)
        raise InvalidDeferKey(DEFER, value, f"one of {allowed}") from None


def guest_format(context: Mapping[str, str]) -> volumes.GuestFormat | None:
    """How the guest formats the volume; None if it must not. Raises `InvalidDeferKey`."""
    created_empty = context.get(CREATED_EMPTY, "false")
    if created_empty not in ("true", "false"):
        raise InvalidDeferKey(CREATED_EMPTY, created_empty, "'true' or 'false'")
    if created_empty == "false":
        return None
    made = volumes.GuestFormat(
        _number(context, EXT4_BYTES_PER_INODE), _number(context, EXT4_RESERVED_PERCENT)
    )
    made.check()
    return made


def without(context: Mapping[str, str]) -> dict[str, str]:
    """The keys that are not crust's."""
    return {key: value for key, value in context.items() if not key.startswith(PREFIX)}


def _number(context: Mapping[str, str], key: str) -> int | None:
    value = context.get(key)
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal()):
        raise InvalidDeferKey(key, value, "a decimal number")
    return int(value)
