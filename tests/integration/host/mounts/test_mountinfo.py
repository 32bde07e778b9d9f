"""Which mount is at a path, and which one holds it."""

import os
import sys
from pathlib import Path

import pytest

from crust.host.mounts import mount_api, mountinfo

pytestmark = pytest.mark.root


def test_at_does_not_keep_the_mount_busy(mountpoint: str) -> None:
    """Not even for a moment: a descriptor of it would refuse an unmount in another process."""
    mount_api.mount_guard(mountpoint)
    opened: list[str] = []

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and watching:
            opened.append(str(arguments[0]))

    watching = True
    sys.addaudithook(note)
    assert mountinfo.at(mountpoint) is not None
    watching = False
    assert set(opened) <= {"/proc/self/mountinfo"}


def test_mount_that_an_earlier_list_lacks_is_found(mountpoint: str) -> None:
    earlier = mountinfo.listing()
    mount_api.mount_guard(mountpoint)
    found = mountinfo.at(mountpoint, lambda: earlier)
    assert found is not None
    assert mount_api.is_guard(found)
    now = mountinfo.listing()
    assert mountinfo.at(mountpoint, lambda: now) == found
    of_another = now.replace(os.fsencode(mountpoint), b"/elsewhere")  # its number was given again
    assert mountinfo.at(mountpoint, lambda: of_another) == found


def test_at_finds_mount_through_linked_parent_and_not_when_covered(tmp_path: Path) -> None:
    """The kubelet's root is a symbolic link on some nodes: comparing texts would see no mount and stack another."""
    (tmp_path / "real" / "v").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    mount_api.mount_guard(str(tmp_path / "real" / "v"))
    try:
        assert mountinfo.at(str(tmp_path / "link" / "v")) == mountinfo.at(
            str(tmp_path / "real" / "v")
        )
        mount_api.mount_guard(str(tmp_path / "real"))
        assert mountinfo.at(str(tmp_path / "real" / "v")) is None
    finally:
        mount_api.unmount(str(tmp_path / "real"))
        mount_api.unmount(str(tmp_path / "real" / "v"))


def test_mount_that_holds_path_is_deepest_and_topmost_of_list(
    tmp_path: Path,
) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    mount_api.mount_guard(str(inner))
    mount_api.mount_guard(str(inner))
    try:
        for path in (inner, inner / "not" / "there", tmp_path, tmp_path / "absent", "/", "/proc/1"):
            held, listed = (
                mountinfo.holding(str(path)),
                mountinfo.listed_above(str(path), mountinfo.read_all()),
            )
            assert held is not None
            assert listed is not None
            assert (held.mount_id, held.target) == (listed.mount_id, listed.target)
    finally:
        mount_api.unmount(str(inner))
