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
def test_translate_maps_errno_to_its_branch(number: int, branch: type[errors.CrustError]) -> None:
    assert type(oserrors.translate(OSError(number, "x"), "cannot do it")) is branch


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
