"""System calls and their errors; the datagrams to systemd."""

import errno
import os
import socket
from pathlib import Path

import grpc
import pytest

from crust.core import errors
from crust.host.process import oserrors, sysfs, systemd
from crust.rpc import status

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
        # alone it says nothing about the object of a call: a missing /dev/loop-control is no missing volume, and a
        # process without descriptors is no full node
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
        (errno.EXFULL, errors.RuntimeFailed, Code.INTERNAL),
    ],
)
def test_errno_gives_the_branch_that_code_catches_and_the_code_that_a_co_may_act_on(
    number: int, kind: type[errors.CrustError], code: grpc.StatusCode
) -> None:
    error = oserrors.translate(OSError(number, "x"), "cannot do it")
    assert isinstance(error, kind)
    assert status.code_of(error) is code
    assert errno.errorcode[number] in error.why


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


def test_translating_passes_crust_errors_unchanged() -> None:
    original = errors.Conflict("two")
    with pytest.raises(errors.Conflict) as caught, oserrors.translating("cannot"):
        raise original
    assert caught.value is original


def test_boot_id_is_a_constant_uuid() -> None:
    assert sysfs.boot_id() == sysfs.boot_id()
    assert len(sysfs.boot_id().split("-")) == 5


@pytest.mark.parametrize("address", ["PATH", "@crust-test"])
def test_systemd_is_told_of_the_start_and_that_the_process_lives(
    tmp_path: Path, address: str
) -> None:
    """At a socket with a path, and at an abstract one."""
    address = address.replace("PATH", str(tmp_path / "notify")).replace("@", f"@{os.getpid()}-")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listens:
        listens.bind(address.replace("@", "\0"))
        unit = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "60000000"}
        assert systemd.ping_watchdog(unit)
        assert listens.recv(64) == b"WATCHDOG=1"
        assert systemd.ping_watchdog(unit | {"WATCHDOG_PID": str(os.getpid())})
        assert listens.recv(64) == b"WATCHDOG=1"
        assert systemd.report_serving({"NOTIFY_SOCKET": address})
        assert listens.recv(64) == b"READY=1"
    assert systemd.ping_watchdog(unit), "a systemd that does not listen is no error"


def test_nothing_is_sent_outside_of_a_unit_or_for_another_process(tmp_path: Path) -> None:
    here = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
    assert not systemd.report_serving({})
    assert not systemd.ping_watchdog({})
    assert not systemd.ping_watchdog({"WATCHDOG_USEC": "1"})
    assert not systemd.ping_watchdog(here)
    assert not systemd.ping_watchdog(here | {"WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"})
