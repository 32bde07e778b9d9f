"""Errors of system calls: their branch, and what they keep; the id of the boot."""

import errno

import grpc
import pytest

from crust.core import errors
from crust.host.process import syscalls
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
        (errno.ENODEV, errors.RuntimeFailed, Code.INTERNAL),
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
def test_errno_gives_branch_for_code_and_status_for_co(
    number: int, kind: type[errors.CrustError], code: grpc.StatusCode
) -> None:
    error = syscalls.translate(OSError(number, "x"), "cannot do it")
    assert isinstance(error, kind)
    assert status.code_of(error) is code
    assert errno.errorcode[number] in error.why


def test_translate_keeps_cause_reason_and_path() -> None:
    with (
        pytest.raises(errors.NotFound) as caught,
        syscalls.translating("cannot read it", hint="repair it"),
    ):
        open("/nonexistent/file").close()
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert str(caught.value) == (
        "cannot read it: No such file or directory (ENOENT), /nonexistent/file; repair it"
    )


def test_translating_passes_crust_errors_unchanged() -> None:
    original = errors.Conflict("two")
    with pytest.raises(errors.Conflict) as caught, syscalls.translating("cannot"):
        raise original
    assert caught.value is original


def test_boot_id_is_a_constant_uuid() -> None:
    assert syscalls.boot_id() == syscalls.boot_id()
    assert len(syscalls.boot_id().split("-")) == 5
