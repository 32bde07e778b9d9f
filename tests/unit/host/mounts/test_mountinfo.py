"""mountinfo: propagation, names, and the mount at a path."""

from pathlib import Path

import pytest

from crust.host import answers
from crust.host.mounts import mountinfo
from tests.support.faults import lies

LINES = (
    b"36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 shared:7 - ext3 /dev/root rw,errors=continue\n"
    b"41 36 0:50 / /a\\040b\\011c\\012d\\134e\\043f ro,relatime - tmpfs none rw,size=4k\n"
    b"42 36 7:3 / /caf\xc3\xa9/\xff rw - ext4 /dev/loop3 rw\n"
)


def test_parse_reads_propagation_of_any_number_of_optional_fields() -> None:
    first = mountinfo.parse(LINES)[0]
    assert first == mountinfo.Mount(
        mount_id=36,
        parent_id=35,
        major=98,
        minor=0,
        root="/mnt1",
        target="/mnt2",
        options=("rw", "noatime"),
        fs_type="ext3",
        source="/dev/root",
        super_options=("rw", "errors=continue"),
        peer_group=7,
        master=1,
    )


def test_parse_decodes_names_and_finds_what_is_read_only() -> None:
    """Names with octal escapes, and such as are not UTF-8; a source may be empty."""
    first, escaped, bytes_of = mountinfo.parse(LINES)
    assert escaped.target == "/a b\tc\nd\\e#f"
    assert bytes_of.target.encode("utf-8", "surrogateescape") == b"/caf\xc3\xa9/\xff"
    assert [mount.writes_here for mount in (first, escaped, bytes_of)] == [True, False, True]
    (mount,) = mountinfo.parse(b"41 36 0:50 / /x rw - tmpfs  rw\n")
    assert (mount.source, mount.super_options) == ("", ("rw",))


def test_at_finds_mount_through_link_above_and_not_at_end(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc")
    (tmp_path / "top").symlink_to("/")
    for path in (tmp_path, tmp_path / "absent", tmp_path / "link"):
        assert mountinfo.at(str(path)) is None
    for path, target in ((Path("/"), "/"), (tmp_path / "top" / "proc", "/proc")):
        mount = mountinfo.at(str(path))
        assert mount is not None
        assert mount.target == target


def test_path_that_is_not_seen_lies_perhaps_on_any_mount(tmp_path: Path) -> None:
    """The paths of the list say nothing then: here they would say that it is not on /proc."""
    (tmp_path / "link").symlink_to("/proc")
    path = f"{tmp_path}/link/self"
    held = mountinfo.holding(path)
    assert held is not None
    assert held.target == "/proc"
    path_alone = lies.Concerns(frozenset({path}), ())
    for number in lies.ERRNOS:
        failure = lies.Failure(0, number)
        with lies.failing(path_alone, failure), pytest.raises(answers.NotSeen):
            mountinfo.holding(path)
        assert failure.call
