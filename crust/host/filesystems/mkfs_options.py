"""The options of mkfs that a StorageClass may set: two of ext4, each with its values.

Nothing of a parameter reaches a command line but what is listed here. A key names its filesystem, so that one class
can serve several; a key of another filesystem than the volume's has no effect. These options come after crust's own,
and mkfs uses the last of two.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from crust import deferral_keys


@dataclass(frozen=True, slots=True)
class _Option:
    fs_type: str
    flag: str
    least: int
    most: int


_OPTIONS = {
    deferral_keys.EXT4_BYTES_PER_INODE: _Option("ext4", "-i", 4096, 64 * 1024 * 1024),
    deferral_keys.EXT4_RESERVED_PERCENT: _Option("ext4", "-m", 0, 50),
}

KEYS = tuple(_OPTIONS)
"""The parameters' keys."""


def allowed(key: str, value: str) -> str:
    """What `key` of `KEYS` may be, in words, if `value` is not that; empty if it is."""
    option = _OPTIONS[key]
    plain = value.isascii() and value.isdecimal() and str(int(value)) == value
    if plain and option.least <= int(value) <= option.most:
        return ""
    return f"a number from {option.least} to {option.most}"


def arguments(fs_type: str, parameters: Mapping[str, str]) -> tuple[str, ...]:
    """The options for mkfs of `fs_type` besides crust's own, from checked parameters."""
    found: list[str] = []
    for key, option in _OPTIONS.items():
        if key in parameters and option.fs_type == fs_type:
            found += [option.flag, parameters[key]]
    return tuple(found)
