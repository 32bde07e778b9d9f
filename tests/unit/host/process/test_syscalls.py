"""System calls and their errors; the datagrams to systemd."""

import errno
import os
import socket
from pathlib import Path

import grpc
import pytest

from crust.core import errors
from crust.host.process import oserrors, syscalls, sysfs, systemd
from crust.rpc import status


def test_is_known_absent_after_a_look_for_a_missing_name_is_true(tmp_path: Path) -> None:
    path = tmp_path / "missing"
    assert not os.path.lexists(path)  # from now on the kernel knows
    assert syscalls.is_known_absent(str(path))
    assert syscalls.is_known_absent(str(path / "below"))


def test_is_known_absent_of_what_is_there_is_false(tmp_path: Path) -> None:
    for name in ("directory", "file", "link"):
        assert not os.path.lexists(tmp_path / name)
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("missing")
    for name in ("directory", "file", "link"):
        assert not syscalls.is_known_absent(str(tmp_path / name))


def test_is_known_absent_below_a_file_is_false(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not syscalls.is_known_absent(str(tmp_path / "file" / "below"))


Code = grpc.StatusCode


@pytest.mark.parametrize(
    ("number", "kind", "code"),
    [
        (errno.ENOSPC, errors.Exhausted, Code.RESOURCE_EXHAUSTED),
        (errno.EDQUOT, errors.Exhausted, Code.RESOURCE_EXHAUSTED),
        (errno.EBUSY, errors.NotReady, Code.FAILED_PRECONDITION),
        (errno.EUCLEAN, errors.Corrupt, Code.DATA_LOSS),
        (errno.EIO, errors.RuntimeFailed, Code.INTERNAL),
        (errno.EINVAL, errors.RuntimeFailed, Code.INTERNAL),
    ],
)
def test_errno_that_means_what_it_says_gives_the_code(
    number: int, kind: type[errors.CrustError], code: grpc.StatusCode
) -> None:
    error = oserrors.translate(OSError(number, "x"), "cannot do it")
    assert (type(error), status.code_of(error)) == (kind, code)


@pytest.mark.parametrize(
    ("number", "kind", "code"),
    [
        (errno.ENOENT, errors.NotFound, Code.INTERNAL),
        (errno.ENODEV, errors.NotFound, Code.INTERNAL),
        (errno.EACCES, errors.Refused, Code.INTERNAL),
        (errno.EPERM, errors.Refused, Code.INTERNAL),
        (errno.EROFS, errors.Refused, Code.INTERNAL),
        (errno.ELOOP, errors.Refused, Code.INTERNAL),
        (errno.EEXIST, errors.Conflict, Code.INTERNAL),
        (errno.EOPNOTSUPP, errors.Unsupported, Code.INTERNAL),
        (errno.ENAMETOOLONG, errors.InvalidRequest, Code.INTERNAL),
        (errno.ENOMEM, errors.Exhausted, Code.UNAVAILABLE),
        (errno.EMFILE, errors.Exhausted, Code.UNAVAILABLE),
    ],
)
def test_errno_alone_says_nothing_about_the_object_of_a_call(
    number: int, kind: type[errors.CrustError], code: grpc.StatusCode
) -> None:
    """A missing /dev/loop-control is no missing volume, and a process without descriptors is no full node."""
    error = oserrors.translate(OSError(number, "x"), "cannot do it")
    assert isinstance(error, kind)
    assert status.code_of(error) is code


def test_translate_keeps_cause_reason_and_path() -> None:
    with (
        pytest.raises(errors.NotFound) as caught,
        oserrors.translating("cannot read it", hint="repair it"),
    ):
        open("/nonexistent/file").close()
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert str(caught.value) == (
        "cannot read it: No such file or directory (ENOENT), /nonexistent/file; repair it"
    )


def test_translate_of_an_unlisted_errno_is_runtime_failed() -> None:
    error = oserrors.translate(OSError(errno.EXFULL, "x"), "cannot")
    assert type(error) is errors.RuntimeFailed
    assert "EXFULL" in error.why


def test_translating_passes_crust_errors_unchanged() -> None:
    original = errors.Conflict("two")
    with pytest.raises(errors.Conflict) as caught, oserrors.translating("cannot"):
        raise original
    assert caught.value is original


def test_boot_id_is_a_constant_uuid() -> None:
    assert sysfs.boot_id() == sysfs.boot_id()
    assert len(sysfs.boot_id().split("-")) == 5


def test_watchdog_is_notified_at_the_socket_of_systemd(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listens:
        listens.bind(str(path))
        unit = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "60000000"}
        assert systemd.ping_watchdog(unit)
        assert listens.recv(64) == b"WATCHDOG=1"
        assert systemd.ping_watchdog(unit | {"WATCHDOG_PID": str(os.getpid())})


def test_watchdog_is_notified_at_an_abstract_socket() -> None:
    name = f"crust-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listens:
        listens.bind(f"\0{name}")
        assert systemd.ping_watchdog({"NOTIFY_SOCKET": f"@{name}", "WATCHDOG_USEC": "1"})
        assert listens.recv(64) == b"WATCHDOG=1"


def test_nothing_is_sent_without_a_watchdog_or_for_another_process(tmp_path: Path) -> None:
    here = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
    assert not systemd.ping_watchdog({})
    assert not systemd.ping_watchdog({"WATCHDOG_USEC": "1"})
    assert not systemd.ping_watchdog(here)
    assert not systemd.ping_watchdog(here | {"WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"})


def test_systemd_that_does_not_listen_is_no_error(tmp_path: Path) -> None:
    assert systemd.ping_watchdog(
        {"NOTIFY_SOCKET": str(tmp_path / "gone"), "WATCHDOG_USEC": "60000000"}
    )


def test_start_is_reported_with_and_without_a_watchdog(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    assert not systemd.report_serving({})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listens:
        listens.bind(str(path))
        assert systemd.report_serving({"NOTIFY_SOCKET": str(path)})
        assert listens.recv(64) == b"READY=1"
