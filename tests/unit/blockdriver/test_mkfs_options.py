"""What a StorageClass may say of mkfs, and that nothing else gets through."""

import pytest

from crust.blockdriver.controller import class_parameters
from crust.host.filesystems import mkfs
from tests.support.raised import raised

FS_TYPES = ("ext4", "xfs", "btrfs")


def test_mkfs_options_apply_to_their_filesystem_only() -> None:
    sent = {
        "crust.dev/ext4-bytes-per-inode": "65536",
        "crust.dev/ext4-reserved-percent": "1",
    }
    kept = class_parameters.parse(sent, FS_TYPES).kept
    assert kept == sent
    assert mkfs.arguments("ext4", kept) == ("-i", "65536", "-m", "1")
    assert mkfs.arguments("xfs", kept) == ()
    assert class_parameters.parse(sent, FS_TYPES).volume_context == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ext4-bytes-per-inode", "1"),
        ("ext4-bytes-per-inode", "65536 -F"),
        ("ext4-bytes-per-inode", "+65536"),
        ("ext4-bytes-per-inode", "٦٥٥٣٦"),
        ("ext4-reserved-percent", ""),
        ("ext4-reserved-percent", "51"),
    ],
)
def test_mkfs_options_with_invalid_value_are_refused(key: str, value: str) -> None:
    with pytest.raises(class_parameters.InvalidParameter):
        class_parameters.parse({f"crust.dev/{key}": value}, FS_TYPES)


@pytest.mark.parametrize(
    "key", ["ext4-features", "ext4-inode-size", "xfs-reflink", "btrfs-metadata"]
)
def test_mkfs_options_with_unknown_key_are_refused_with_the_known_ones(key: str) -> None:
    with raised("UnknownParameter", match="ext4-bytes-per-inode"):
        class_parameters.parse({f"crust.dev/{key}": "1"}, FS_TYPES)
