"""The calls that fail in `tests.support.faults.lies`: those that concern the paths, one at a time, and no other."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from crust.host.process import syscalls
from tests.support.faults import lies
from tests.support.faults.lies import ERRNOS, Concerns, Failure


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "asked").mkdir()
    (tmp_path / "asked" / "file").write_text("text")
    (tmp_path / "other").write_text("other")
    return f"{tmp_path}/asked"


def _concerns(path: str) -> Concerns:
    return Concerns(frozenset({"/proc"}), (path, f"/proc/{os.getpid()}"))


CALLS: dict[str, Callable[[str], object]] = {
    "open": lambda path: os.close(os.open(f"{path}/file", os.O_RDONLY | os.O_EXCL)),
    "listdir": lambda path: os.listdir(path),
    "scandir": lambda path: os.scandir(path).close(),
    "readlink": lambda _path: os.readlink(f"/proc/{os.getpid()}/exe"),
    "stat": lambda path: os.stat(f"{path}/file"),
    "lstat": lambda path: os.lstat(path),
    "statvfs": lambda path: os.statvfs(path),
    "pidfd_open": lambda _path: os.close(os.pidfd_open(os.getpid())),
    "builtin open": lambda path: open(f"{path}/file").close(),
    "a path's open": lambda path: Path(path, "file").read_text(),
    "a path's list": lambda path: [*Path(path).iterdir()],
    "statx": lambda path: syscalls.block_device_at(f"{path}/file"),
    "processes": lambda _path: os.listdir("/proc"),
}


@pytest.mark.parametrize("name", CALLS)
def test_call_that_concerns_a_path_fails_once(path: str, name: str) -> None:
    failure = Failure(0, errno.ESTALE)
    with lies.failing(_concerns(path), failure):
        with pytest.raises(OSError, match="Stale") as raised:
            CALLS[name](path)
        CALLS[name](path)
    assert raised.value.errno == errno.ESTALE
    assert "ESTALE" in str(failure)
    assert failure.call


def test_call_that_concerns_no_path_is_real(path: str) -> None:
    failure = Failure(0, errno.EIO)
    with lies.failing(_concerns(path), failure) as count:
        assert os.listdir(os.path.dirname(path))
        assert os.stat(f"{os.path.dirname(path)}/other").st_size == len("other")
        os.close(os.pidfd_open(os.getppid()))
    assert count() == 0
    assert not failure.call


def test_reads_of_a_descriptor_count_until_another_file_has_it(path: str) -> None:
    with lies.failing(_concerns(path), Failure(-1, errno.EIO)) as count:
        fd = os.open(f"{path}/file", os.O_RDONLY)
        os.read(fd, 1)
        assert stat.S_ISREG(os.fstat(fd).st_mode)
        os.close(fd)
        assert count() == 3
        again = os.open("/dev/null", os.O_RDONLY)
        assert again == fd
        os.read(again, 1)
        os.close(again)
        assert count() == 3


def test_failures_are_of_each_call_in_turn(path: str) -> None:
    def ask() -> str:
        os.stat(path)
        return Path(path, "file").read_text()

    asked = [*lies.failures(ask, _concerns(path), errnos_of=lies.in_turn(1))]
    assert [str(each.failure) for each in asked] == [
        f"stat {path}: EPERM",
        f"open {path}/file: EMFILE",
    ]
    assert all(isinstance(each.error, OSError) for each in asked)


def test_failures_with_all_errnos_are_the_whole_matrix(path: str) -> None:
    def ask() -> bool:
        try:
            os.stat(path)
        except PermissionError:
            return False
        return True

    asked = [*lies.failures(ask, _concerns(path), errnos_of=lies.all_errnos)]
    assert [each.failure.errno for each in asked] == [*ERRNOS]
    assert sum(each.value is False for each in asked) == 2  # EACCES, EPERM
    assert sum(each.error is not None for each in asked) == len(ERRNOS) - 2
