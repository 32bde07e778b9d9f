"""Parameters of a StorageClass, of mkfs, and the limits among them."""

from dataclasses import replace

import pytest

from crust.blockdriver.controller import class_parameters
from crust.core import volumes
from crust.core.deferral_keys import DEFER, ENCRYPTION, FORMAT_IN, Defer, InvalidDeferKey
from crust.host.filesystems import mkfs
from tests.support.raised import raised


@pytest.mark.parametrize("value", Defer)
def test_every_value_of_defer_is_accepted_and_reaches_later_calls(value: Defer) -> None:
    """`runtime-class` was refused, though it is the proxy that decides, for every driver alike."""
    read = class_parameters.parse({DEFER: value.value}, mkfs.SUPPORTED)
    assert class_parameters.volume_context(read.kept) == {DEFER: value.value}


@pytest.mark.parametrize(
    "sent",
    [{FORMAT_IN: "host"}, {ENCRYPTION: "aes"}, {ENCRYPTION: "luks", DEFER: Defer.NEVER.value}],
)
def test_deferral_keys_that_contradict_themselves_are_refused(sent: dict[str, str]) -> None:
    with pytest.raises(InvalidDeferKey):
        class_parameters.parse(sent, mkfs.SUPPORTED)


FS_TYPES = ("ext4",)


@pytest.mark.parametrize(
    ("key", "value", "after"),
    [
        ("readIOPS", "3000", volumes.IoLimits(3000, 2, 3, 4)),
        ("writeIOPS", "3000", volumes.IoLimits(1, 3000, 3, 4)),
        ("readBytesPerSecond", "10Mi", volumes.IoLimits(1, 2, 10 << 20, 4)),
        ("writeBytesPerSecond", "10Mi", volumes.IoLimits(1, 2, 3, 10 << 20)),
        ("writeIOPS", "0", volumes.IoLimits(1, 0, 3, 4)),
        ("readIOPS", "10", volumes.IoLimits(10, 2, 3, 4)),
        ("writeBytesPerSecond", "64Ki", volumes.IoLimits(1, 2, 3, 64 << 10)),
    ],
)
def test_parse_sets_the_given_limit_and_keeps_the_others(
    key: str, value: str, after: volumes.IoLimits
) -> None:
    sent = class_parameters.parse_mutable({key: value})
    assert replace(volumes.IoLimits(1, 2, 3, 4), **dict(sent)) == after


@pytest.mark.parametrize("key", ["iops", "readiops", "", "crust.dev/defer"])
def test_parse_unknown_key_is_refused_by_name(key: str) -> None:
    with raised("UnknownMutableParameter", match="readIOPS"):
        class_parameters.parse_mutable({"writeIOPS": "100", key: "1"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("readIOPS", "-1"),
        ("readIOPS", "9"),
        ("readIOPS", "1000000001"),
        ("readIOPS", "10.5"),
        ("writeIOPS", "many"),
        ("writeIOPS", " 100"),
        ("writeIOPS", ""),
        ("writeIOPS", "²"),
        ("readBytesPerSecond", "65535"),
        ("readBytesPerSecond", "1001T"),
        ("readBytesPerSecond", "070000"),
        ("writeBytesPerSecond", "Ki"),
        ("writeBytesPerSecond", "10MiB"),
        ("writeBytesPerSecond", "9" * 300),
    ],
)
def test_parse_out_of_range_number_is_refused(key: str, value: str) -> None:
    with raised("InvalidIoLimit", match=key):
        class_parameters.parse_mutable({key: value})
    with raised("InvalidIoLimit", match=key):
        class_parameters.parse({key: value}, FS_TYPES)


def test_storage_class_sets_the_first_limits_and_keeps_its_parameters() -> None:
    read = class_parameters.parse({"readIOPS": "3k", "crust.dev/defer": "always"}, FS_TYPES)
    assert read.limits == (("read_iops", 3000),)
    assert read.kept == {"readIOPS": "3k", "crust.dev/defer": "always"}
    assert "readIOPS" not in class_parameters.volume_context(read.kept)


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("70000", 70000), ("300k", 300_000), ("64Ki", 65536), ("2Ti", 2 << 40)],
)
def test_parse_accepts_kubernetes_quantities(text: str, number: int) -> None:
    changes = class_parameters.parse_mutable({"readBytesPerSecond": text})
    assert changes == (("read_bytes_per_second", number),)


ALL_FS_TYPES = ("ext4", "xfs", "btrfs")


def test_mkfs_options_apply_to_their_filesystem_only() -> None:
    sent = {"crust.dev/ext4-bytes-per-inode": "65536", "crust.dev/ext4-reserved-percent": "1"}
    kept = class_parameters.parse(sent, ALL_FS_TYPES).kept
    assert kept == sent
    assert mkfs.arguments("ext4", kept) == ("-i", "65536", "-m", "1")
    assert mkfs.arguments("xfs", kept) == ()
    assert class_parameters.volume_context(kept) == {}


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
    with raised("InvalidParameter"):
        class_parameters.parse({f"crust.dev/{key}": value}, ALL_FS_TYPES)


@pytest.mark.parametrize(
    "key", ["ext4-features", "ext4-inode-size", "xfs-reflink", "btrfs-metadata"]
)
def test_mkfs_options_with_unknown_key_are_refused_naming_known_ones(key: str) -> None:
    with raised("UnknownParameter", match="ext4-bytes-per-inode"):
        class_parameters.parse({f"crust.dev/{key}": "1"}, ALL_FS_TYPES)
