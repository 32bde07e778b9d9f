"""The errno table."""

import errno

import pytest

from crust import errors
from crust.host.process import oserrors


@pytest.mark.parametrize(
    ("number", "branch"),
    [
        (errno.ENOSPC, errors.Exhausted),
        (errno.EDQUOT, errors.Exhausted),
        (errno.ENOENT, errors.NotFound),
        (errno.EBUSY, errors.NotReady),
        (errno.EACCES, errors.Refused),
        (errno.EPERM, errors.Refused),
        (errno.EROFS, errors.Refused),
        (errno.ELOOP, errors.Refused),
        (errno.EEXIST, errors.Conflict),
        (errno.EUCLEAN, errors.Corrupt),
        (errno.EOPNOTSUPP, errors.Unsupported),
        (errno.EIO, errors.RuntimeFailed),
        (errno.EINVAL, errors.RuntimeFailed),
    ],
)
def test_errno_becomes_the_branch_that_says_what_to_do(
    number: int, branch: type[errors.CrustError]
) -> None:
    assert type(oserrors.translate(OSError(number, "x"), "cannot do it")) is branch


def test_translation_keeps_cause_reason_and_path() -> None:
    with (
        pytest.raises(errors.NotFound) as caught,
        oserrors.translating("cannot read it", hint="mend"),
    ):
        open("/nonexistent/file").close()
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert str(caught.value) == (
        "cannot read it: No such file or directory (ENOENT), /nonexistent/file; mend"
    )


def test_an_errno_without_a_row_is_a_failure_and_not_the_callers_fault() -> None:
    error = oserrors.translate(OSError(errno.EXFULL, "x"), "cannot")
    assert type(error) is errors.RuntimeFailed
    assert "EXFULL" in error.why


def test_errors_of_crust_pass_unchanged() -> None:
    original = errors.Conflict("two")
    with pytest.raises(errors.Conflict) as caught, oserrors.translating("cannot"):
        raise original
    assert caught.value is original
