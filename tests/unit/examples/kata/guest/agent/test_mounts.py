"""Mount options."""

import pytest

from examples.kata.guest.agent import linux, mounts, protocol


def test_mount_options_split_into_attributes_and_filesystem_options() -> None:
    options = ["rw", "noatime", "nodev", "data=ordered", "discard", "_netdev", "x-systemd.y", "ro"]
    attributes, rest, read_only = mounts.split(options)
    assert attributes == linux.MOUNT_ATTR_NOATIME | linux.MOUNT_ATTR_NODEV
    assert rest == ["data=ordered", "discard"]
    assert read_only


@pytest.mark.parametrize("option", ["remount", "bind", "loop", "a,b", ""])
def test_mount_options_of_other_operations_are_refused(option: str) -> None:
    with pytest.raises(protocol.Fault, match="bad_request"):
        mounts.split([option])
