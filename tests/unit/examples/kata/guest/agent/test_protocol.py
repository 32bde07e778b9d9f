"""The agent's parts that need no guest: framing, arguments, options, subPaths and fsGroup on a real tree."""

import errno
import itertools
import os
import stat
from pathlib import Path

import pytest

from examples.kata.guest.agent import fs_group, jail, linux, mounts, protocol

_Args = protocol.Args


def test_lines_split_correctly_at_any_read_boundary() -> None:
    stream = b'{"a":1}\n\n{"b":2}\n'
    for size in range(1, len(stream) + 1):
        lines = protocol.Lines()
        pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
        assert [line for piece in pieces for line in lines.feed(piece)] == [b'{"a":1}', b'{"b":2}']


def test_too_long_line_is_dropped_up_to_its_newline() -> None:
    lines = protocol.Lines()
    long = b"x" * (protocol.MAX_LINE + 1)
    for piece in (long[:1000], long, b"more"):
        assert list(lines.feed(piece)) == []
    assert list(lines.feed(b"end\nnext\n")) == [None, b"next"]
    assert list(lines.feed(long + b"\nnext\n")) == [None, b"next"]


def test_reset_drops_a_partial_line() -> None:
    lines = protocol.Lines()
    assert list(lines.feed(b'{"id":"ha')) == []
    lines.reset()
    assert list(lines.feed(b"{}\n")) == [b"{}"]


def test_encode_of_too_long_answer_becomes_an_error() -> None:
    line = protocol.encode({"id": "7", "ok": {"x": "y" * protocol.MAX_LINE}})
    assert len(line) < 200
    assert b'"id":"7"' in line
    assert b"exhausted" in line


@pytest.mark.parametrize(
    "values",
    [
        {"volume": "../x"},
        {"volume": ""},
        {"volume": "a" * 21},
        {"volume": "-x"},
        {"volume": "a\n"},
        {"volume": 3},
        {"volume": None},
        {},
        {"volume": "ok", "size": True},
        {"volume": "ok", "size": -1},
        {"volume": "ok", "size": 11},
        {"volume": "ok", "size": 1.0},
        {"volume": "ok", "size": 1, "surprise": 1},
    ],
)
def test_invalid_arguments_are_refused(values: dict[str, object]) -> None:
    def read() -> None:
        args = _Args(values)
        args.name("volume")
        args.integer("size", 0, 10)
        args.end()

    with pytest.raises(protocol.Fault) as caught:
        read()
    assert caught.value.code == "bad_request"


def test_fault_of_oserror_keeps_its_errno_name() -> None:
    fault = protocol.fault_of(OSError(errno.ENOSPC, "No space left", b"/x"), "growing")
    assert (fault.code, fault.message) == (
        "exhausted",
        "growing failed (/x): No space left [ENOSPC]",
    )


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


@pytest.mark.parametrize(
    ("mode", "read_only", "expected"),
    [
        (stat.S_IFREG | 0o600, False, 0o660),
        (stat.S_IFREG | 0o600, True, 0o640),
        (stat.S_IFREG | 0o000, True, 0o440),
        (stat.S_IFREG | 0o4755, False, 0o4775),
        (stat.S_IFDIR | 0o700, False, 0o2770),
        (stat.S_IFDIR | 0o700, True, 0o2750),
        (stat.S_IFDIR | 0o1777, False, 0o3777),
        (stat.S_IFIFO | 0o600, False, 0o660),
    ],
)
def test_fs_group_modes_match_the_kubelet(mode: int, read_only: bool, expected: int) -> None:  # noqa: FBT001
    assert fs_group.wanted_mode(mode, read_only=read_only) == expected


def _apply(path: str, gid: int, policy: str, *, read_only: bool) -> int:
    """The number of entries that a whole walk visits."""
    return sum(1 for _ in fs_group.walk(path, gid, policy, read_only=read_only))


def test_fs_group_does_not_follow_symlinks(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    (outside / "secret").write_text("x")
    (outside / "secret").chmod(0o600)
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True, mode=0o700)
    (tree / "sub" / "file").write_text("x")
    (tree / "sub" / "file").chmod(0o600)
    (tree / "file-link").symlink_to(outside / "secret")
    (tree / "dir-link").symlink_to(outside)
    (tree / "self").symlink_to("self")
    os.mkfifo(tree / "pipe", 0o600)
    visited = _apply(str(tree), os.getgid(), fs_group.ALWAYS, read_only=False)
    assert visited == 7
    modes = {p.name: stat.S_IMODE(p.lstat().st_mode) for p in (tree, *tree.rglob("*"))}
    assert (modes["tree"] & 0o2770, modes["sub"] & 0o2770) == (0o2770, 0o2770)
    assert (modes["file"], modes["pipe"]) == (0o660, 0o660)
    assert stat.S_IMODE((outside / "secret").stat().st_mode) == 0o600
    assert stat.S_IMODE(outside.stat().st_mode) == 0o700


def test_on_root_mismatch_skips_a_tree_with_matching_root(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "file").chmod(0o600)
    group, policy = os.getgid(), fs_group.ON_ROOT_MISMATCH
    assert _apply(str(tmp_path), group, policy, read_only=False) == 2
    (tmp_path / "file").chmod(0o600)
    assert _apply(str(tmp_path), group, policy, read_only=False) == 0
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    tmp_path.chmod(0o770)
    assert _apply(str(tmp_path), group, policy, read_only=False) == 2


def test_fs_group_refuses_too_deep_tree_and_leaks_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs_group, "_MAX_DEPTH", 20)
    tmp_path.joinpath(*["d"] * 30).mkdir(parents=True)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(protocol.Fault, match="refused"):
        _apply(str(tmp_path), os.getgid(), fs_group.ALWAYS, read_only=False)
    assert len(os.listdir("/proc/self/fd")) == before


def test_ended_fs_group_walk_leaves_root_and_no_descriptor(tmp_path: Path) -> None:
    """OnRootMismatch must not treat it as a finished one."""
    for name in range(5):
        (tmp_path / str(name)).mkdir(mode=0o700)
    tmp_path.chmod(0o700)
    before = len(os.listdir("/proc/self/fd"))
    walk = fs_group.walk(str(tmp_path), os.getgid(), fs_group.ON_ROOT_MISMATCH, read_only=False)
    assert len(list(itertools.islice(walk, 3))) == 3
    walk.close()  # type: ignore[attr-defined]  # it is a generator
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
    assert len(os.listdir("/proc/self/fd")) == before
    assert _apply(str(tmp_path), os.getgid(), fs_group.ON_ROOT_MISMATCH, read_only=False) == 6


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """A volume's tree beside something that is none of its business."""
    (tmp_path / "outside").mkdir()
    root = tmp_path / "volume"
    (root / "a" / "b").mkdir(parents=True)
    (root / "inside").symlink_to("a/b")
    (root / "absolute").symlink_to("/etc")
    (root / "up").symlink_to("../outside")
    (root / "a" / "chain").symlink_to("../up")
    (root / "file").write_text("x")
    os.mkfifo(root / "fifo")
    return root


def _resolve(volume: Path, sub_path: str, *, create: bool) -> str:
    root = os.open(volume, os.O_RDONLY | os.O_DIRECTORY)
    try:
        descriptor = jail.resolve_sub_path(root, sub_path, create=create)
    finally:
        os.close(root)
    try:
        return os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), volume)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("sub_path", "expected"),
    [("a/b", "a/b"), ("inside", "a/b"), ("a//./b/", "a/b"), ("file", "file"), ("", ".")],
)
def test_a_sub_path_inside_the_volume_is_found(volume: Path, sub_path: str, expected: str) -> None:
    assert _resolve(volume, sub_path, create=False) == expected


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize(
    "sub_path",
    ["absolute", "absolute/passwd", "up", "up/new", "a/chain", "../x", "/etc", "a/../b", "fifo"],
)
def test_sub_path_that_leads_out_is_refused_and_creates_nothing(
    volume: Path, sub_path: str, *, create: bool
) -> None:
    before = sorted(volume.parent.rglob("*"))
    with pytest.raises(protocol.Fault, match="refused"):
        _resolve(volume, sub_path, create=create)
    assert sorted(volume.parent.rglob("*")) == before


def test_missing_directories_of_sub_path_are_made_with_roots_mode(volume: Path) -> None:
    volume.chmod(0o770)
    assert _resolve(volume, "inside/x/y", create=True) == "a/b/x/y"
    assert stat.S_IMODE((volume / "a/b/x").stat().st_mode) == 0o770
    with pytest.raises(protocol.Fault, match="not_found"):
        _resolve(volume, "other/x", create=False)
