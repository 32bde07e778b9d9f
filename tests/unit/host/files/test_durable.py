"""Durable files: written atomically, and read only if no other user could have written them."""

import errno
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from crust.core import errors
from crust.host.files import durable
from tests.support.faults.syncs import recorded

LIMIT = 1000


def test_publish_then_read_returns_the_content(tmp_path: Path) -> None:
    durable.write_file(tmp_path / "a", b"one")
    durable.write_file(tmp_path / "a", b"two")
    assert durable.read(tmp_path / "a", limit_bytes=LIMIT) == b"two"
    durable.write_file(tmp_path / ("n" * 255), b"x")
    assert set(os.listdir(tmp_path)) == {"a", "n" * 255}


def test_publish_sets_the_exact_mode_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        durable.write_file(tmp_path / "a", b"", mode=0o644)
        durable.make_directory(tmp_path / "d", 0o755)
        durable.make_staging(tmp_path / "s", 0o755)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "d").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o755


def test_publish_replaces_a_symlink_and_not_its_target(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / "a").symlink_to("victim")
    durable.write_file(tmp_path / "a", b"new")
    assert (tmp_path / "victim").read_bytes() == b"precious"
    assert not (tmp_path / "a").is_symlink()


def test_publish_over_a_directory_fails_without_temporary_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(errors.Conflict):
        durable.write_file(tmp_path / "a", b"new")
    assert os.listdir(tmp_path) == ["a"]


def test_publish_that_replaces_nothing_is_refused_on_an_existing_file(tmp_path: Path) -> None:
    durable.write_file(tmp_path / "a", b"first", replaces=False)
    with pytest.raises(durable.PathAlreadyExists):
        durable.write_file(tmp_path / "a", b"second", replaces=False)
    assert (tmp_path / "a").read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["a"]


def test_publish_that_replaces_nothing_succeeds_once_in_a_race(tmp_path: Path) -> None:
    results: list[str] = []
    barrier = threading.Barrier(8)

    def compete(number: int) -> None:
        barrier.wait()
        try:
            durable.write_file(tmp_path / "a", bytes([number]) * 100, replaces=False)
            results.append("won")
        except durable.PathAlreadyExists:
            results.append("lost")

    threads = [threading.Thread(target=compete, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results.count("won") == 1
    assert len(set((tmp_path / "a").read_bytes())) == 1
    assert os.listdir(tmp_path) == ["a"]


def test_read_above_the_limit_is_corrupt(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * LIMIT)
    assert len(durable.read(tmp_path / "a", limit_bytes=LIMIT)) == LIMIT
    with pytest.raises(durable.UnreadableFile, match="larger than 999"):
        durable.read(tmp_path / "a", limit_bytes=LIMIT - 1)


def _link(path: Path) -> None:
    path.with_name("real").write_bytes(b"x")
    path.symlink_to("real")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))


def _writable_by_others(path: Path) -> None:
    path.write_bytes(b"x")
    path.chmod(0o666)


def _of_another_user(path: Path) -> None:
    path.write_bytes(b"x")
    os.chown(path, 12345, 12345)


@pytest.mark.parametrize(
    ("make", "error", "why"),
    [
        (lambda path: None, errors.NotFound, "No such file"),
        (_link, errors.Refused, "ELOOP"),
        (os.mkfifo, durable.UnreadableFile, "regular file"),
        # as open(2) of a file on a disk that was set offline, which gives ENODEV: it is not absent
        (_socket, durable.UnreadableFile, "ENXIO"),
        (_writable_by_others, durable.UntrustedFile, "0666"),
        pytest.param(
            *(_of_another_user, durable.UntrustedFile, "12345"),
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away"),
        ),
    ],
)
def test_read_of_untrusted_file_is_refused_without_blocking(
    tmp_path: Path, make: Callable[[Path], None], error: type[errors.CrustError], why: str
) -> None:
    make(tmp_path / "a")
    with pytest.raises(error, match=why):
        durable.read(tmp_path / "a", limit_bytes=LIMIT)


def test_make_directory_keeps_an_existing_one_and_refuses_a_symlink(tmp_path: Path) -> None:
    durable.make_directory(tmp_path / "d", 0o700)
    (tmp_path / "d" / "x").touch()
    durable.make_directory(tmp_path / "d", 0o700)
    assert os.listdir(tmp_path / "d") == ["x"]
    (tmp_path / "link").symlink_to("d")
    with pytest.raises(durable.UntrustedFile):
        durable.make_directory(tmp_path / "link", 0o700)


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_make_directory_where_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d").chmod(mode)
    with pytest.raises(durable.UntrustedFile, match=f"{mode:04o}"):
        durable.make_directory(tmp_path / "d", 0o700)


def test_make_directory_syncs_names_in_existing_one_and_its_own(tmp_path: Path) -> None:
    """A process that was killed between a rename and its sync leaves a name that a power cut takes back."""
    with recorded() as steps:
        durable.make_directory(tmp_path / "d", 0o700)
    assert steps == [("sync", str(tmp_path))]
    with recorded() as steps:
        durable.make_directory(tmp_path / "d", 0o700)
    assert steps == [("sync", str(tmp_path / "d")), ("sync", str(tmp_path))]


@pytest.mark.parametrize("replaces", [True, False])
def test_publish_syncs_content_before_name_and_name_after(
    tmp_path: Path, *, replaces: bool
) -> None:
    with recorded() as steps:
        durable.write_file(tmp_path / "a", b"content", replaces=replaces)
    content, name = ("sync", steps[0][1]), ("name", str(tmp_path / "a"))
    assert content[1].startswith(f"{tmp_path}/.a.")
    assert (steps[:2], steps[-1]) == ([content, name], ("sync", str(tmp_path)))


def test_remove_syncs_the_directory_after_the_name_is_gone(tmp_path: Path) -> None:
    durable.write_file(tmp_path / "a", b"")
    with recorded() as steps:
        durable.remove(tmp_path / "a")
    assert steps == [("name", str(tmp_path / "a")), ("sync", str(tmp_path))]
    durable.remove(tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_publish_directory_syncs_names_in_it_then_its_own(tmp_path: Path) -> None:
    aside, final = tmp_path / ".new", tmp_path / "final"
    durable.make_staging(aside, 0o700)
    with recorded() as steps:
        durable.write_staged(aside / "record", b"content")
        durable.publish_directory(aside, final)
    expected = [("sync", aside / "record"), ("sync", aside), ("name", final), ("sync", tmp_path)]
    assert steps == [(step, str(path)) for step, path in expected]


def test_publish_directory_replaces_only_an_empty_directory(tmp_path: Path) -> None:
    for name in ("one", "two"):
        durable.make_staging(tmp_path / name, 0o700)
        durable.write_staged(tmp_path / name / "record", name.encode())
    (tmp_path / "final").mkdir()
    durable.publish_directory(tmp_path / "one", tmp_path / "final")
    assert (tmp_path / "final" / "record").read_bytes() == b"one"
    with pytest.raises(durable.PathAlreadyExists):
        durable.publish_directory(tmp_path / "two", tmp_path / "final")
    assert (tmp_path / "final" / "record").read_bytes() == b"one"
    assert (tmp_path / "two" / "record").read_bytes() == b"two"
    with pytest.raises(durable.PathAlreadyExists):
        durable.make_staging(tmp_path / "two", 0o700)
    with pytest.raises(errors.NotFound):
        durable.publish_directory(tmp_path / "none", tmp_path / "other")


def test_publish_directory_with_another_error_is_no_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails does not say that another program made the directory."""

    def fail(*paths: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), *paths)

    durable.make_staging(tmp_path / "new", 0o700)
    (tmp_path / "final").mkdir()
    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(errors.RuntimeFailed, match="EIO"):
        durable.publish_directory(tmp_path / "new", tmp_path / "final")


def test_remove_temporary_files_removes_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".a.0123456789ab.crust-tmp").touch()
    (tmp_path / ".hidden").touch()
    (tmp_path / "a").touch()
    durable.remove_temporary_files(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".hidden", "a"]
