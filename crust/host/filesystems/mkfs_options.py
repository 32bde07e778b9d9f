"""How a volume's filesystem is made, as far as a StorageClass may say: a list of options, each with its values.

Nothing of a parameter reaches a command line but what stands here. A key names its filesystem, so that one class can
serve several; what is said of another filesystem than the volume's has no effect. The words come after crust's own,
and mkfs takes the last of two.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

PREFIX = "crust.dev/"


@dataclass(frozen=True, slots=True)
class _Option:
    fs_type: str
    words: tuple[str, ...]
    """For mkfs; the last one is followed by the value."""
    allowed: str
    accepts: Callable[[str], bool]


def _one_of(*values: str) -> tuple[str, Callable[[str], bool]]:
    return f"one of {', '.join(values)}", lambda text: text in values


def _number(least: int, most: int) -> tuple[str, Callable[[str], bool]]:
    def accepts(text: str) -> bool:
        plain = text.isascii() and text.isdecimal() and str(int(text)) == text
        return plain and least <= int(text) <= most

    return f"a number from {least} to {most}", accepts


_OPTIONS = {
    "ext4-bytes-per-inode": _Option("ext4", ("-i", ""), *_number(4096, 64 * 1024 * 1024)),
    "ext4-inode-size": _Option("ext4", ("-I", ""), *_one_of("256", "512", "1024")),
    "ext4-reserved-percent": _Option("ext4", ("-m", ""), *_number(0, 50)),
    "xfs-inode-size": _Option("xfs", ("-i", "size="), *_one_of("512", "1024", "2048")),
    "xfs-inode-percent": _Option("xfs", ("-i", "maxpct="), *_number(1, 100)),
    "xfs-reflink": _Option("xfs", ("-m", "reflink="), *_one_of("0", "1")),
    "btrfs-checksum": _Option("btrfs", ("--csum", ""), *_one_of("crc32c", "xxhash", "sha256", "blake2")),
    "btrfs-metadata": _Option("btrfs", ("-m", ""), *_one_of("single", "dup")),
}  # fmt: skip

KEYS = tuple(PREFIX + name for name in _OPTIONS)
"""The parameters' keys."""


def allowed(key: str, value: str) -> str:
    """What `key` of `KEYS` may be, in words, if `value` is not that; empty if it is."""
    option = _OPTIONS[key.removeprefix(PREFIX)]
    return "" if option.accepts(value) else option.allowed


def words(fs_type: str, parameters: Mapping[str, str]) -> tuple[str, ...]:
    """What mkfs of `fs_type` is told besides crust's own words, by checked parameters."""
    told: list[str] = []
    for name, option in _OPTIONS.items():
        value = parameters.get(PREFIX + name)
        if value is not None and option.fs_type == fs_type:
            *before, last = option.words
            told += [*before, last + value]
    return tuple(told)
