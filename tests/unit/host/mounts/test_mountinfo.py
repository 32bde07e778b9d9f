"""Reading mountinfo."""

from pathlib import Path

from crust.host.mounts import mountinfo

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


def test_parse_decodes_octal_escapes() -> None:
    assert mountinfo.parse(LINES)[1].target == "/a b\tc\nd\\e#f"


def test_parse_keeps_names_that_are_not_utf8() -> None:
    assert (
        mountinfo.parse(LINES)[2].target.encode("utf-8", "surrogateescape") == b"/caf\xc3\xa9/\xff"
    )


def test_parse_accepts_an_empty_source() -> None:
    mount = mountinfo.parse(b"41 36 0:50 / /x rw - tmpfs  rw\n")[0]
    assert (mount.source, mount.super_options) == ("", ("rw",))


def test_readonly_is_true_for_the_mount_or_the_filesystem() -> None:
    assert [mount.readonly for mount in mountinfo.parse(LINES)] == [False, True, False]


def test_at_root_finds_a_mount_and_at_an_ordinary_or_absent_path_none(tmp_path: Path) -> None:
    root = mountinfo.at("/")
    assert root is not None
    assert root.target == "/"
    assert mountinfo.at(str(tmp_path)) is None
    assert mountinfo.at(str(tmp_path / "absent")) is None


def test_at_does_not_follow_a_final_link_but_links_above(
    tmp_path: Path,
) -> None:
    (tmp_path / "link").symlink_to("/proc")
    (tmp_path / "top").symlink_to("/")
    assert mountinfo.at(str(tmp_path / "link")) is None
    through = mountinfo.at(str(tmp_path / "top" / "proc"))
    assert through is not None
    assert through.target == "/proc"
