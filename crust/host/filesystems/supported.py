"""The filesystems that crust makes, checks and grows. `mkfs`, `superblocks` and `growth` know each of them."""

from collections.abc import Mapping
from typing import TypeVar

from crust.core import errors

Row = TypeVar("Row")

SUPPORTED = ("ext4", "xfs", "btrfs")


def row(table: Mapping[str, Row], fs_type: str) -> Row:
    """The row of a filesystem in a table that has one for each; raises `UnknownFilesystem`."""
    try:
        return table[fs_type]
    except KeyError:
        raise errors.InvalidRequest.named(
            "UnknownFilesystem",
            f"the filesystem {fs_type!r} is not supported",
            why=f"only {', '.join(SUPPORTED)} are",
            hint="correct fsType of the StorageClass",
        ) from None
