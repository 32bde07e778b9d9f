"""What fails in Ceph, as crust's errors."""

import errno
from typing import get_args

import pytest

from crust.blockdriver.ceph import binding
from crust.blockdriver.ceph.binding import Step
from crust.core import errors


def _translated(number: int, step: Step) -> errors.CrustError:
    return binding.translated(
        number, "cannot do it", step=step, user="u", monitors="v2:a:1", pool="p"
    )


AGAIN = (
    "ETIMEDOUT ECONNREFUSED ENOTCONN EPIPE EHOSTUNREACH ESTALE EAGAIN EBUSY ECANCELED EROFS EINTR "
    "ESHUTDOWN"
)


@pytest.mark.parametrize("step", get_args(Step))
@pytest.mark.parametrize("name", AGAIN.split())
def test_error_that_a_retry_may_not_get_is_unavailable(name: str, step: Step) -> None:
    assert isinstance(_translated(getattr(errno, name), step), errors.PeerUnavailable)


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL, errno.EDOM, errno.ENOENT, 0, 99999])
def test_anything_else_is_a_failure_with_its_number(number: int) -> None:
    error = _translated(number, "data")
    assert isinstance(error, binding.CephFailed)
    assert str(number) in str(error)


@pytest.mark.parametrize(
    ("number", "step", "name"),
    [
        (errno.EACCES, "connect", "CephKeyRefused"),
        (errno.EINVAL, "connect", "CephKeyRefused"),
        (errno.EPERM, "data", "CephNotPermitted"),
        (errno.EDQUOT, "data", "CephQuotaReached"),
        (errno.ENOSPC, "data", "CephQuotaReached"),
        (errno.ENOENT, "pool", "CephPoolMissing"),
        (errno.ETIMEDOUT, "data", "CephNotAnswering"),
        (errno.ETIMEDOUT, "monitors", "CephMonitorsUnreachable"),
        (errno.ESHUTDOWN, "data", "CephClientBlocklisted"),
        (errno.ESTALE, "data", "CephImageBusy"),
    ],
)
def test_errno_has_its_own_error(number: int, step: Step, name: str) -> None:
    assert _translated(number, step).error_name == name
