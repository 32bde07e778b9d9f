"""What an errno of librados or librbd is at each step, and what a CO is to do then."""

import errno
from typing import get_args

import pytest

from crust.ceph import failures
from crust.ceph.failures import Step
from crust.core import errors


def _translated(number: int, step: Step) -> errors.CrustError:
    return failures.translated(
        number, "cannot do it", step=step, user="u", monitors="v2:a:1", pool="p"
    )


@pytest.mark.parametrize("step", get_args(Step))
@pytest.mark.parametrize(
    "name",
    [
        "ETIMEDOUT",
        "ECONNREFUSED",
        "ENOTCONN",
        "EPIPE",
        "EHOSTUNREACH",
        "ESTALE",
        "EAGAIN",
        "EBUSY",
        "ECANCELED",
        "EROFS",
        "EINTR",
        "ESHUTDOWN",
    ],
)
def test_error_that_a_retry_may_not_get_is_unavailable(name: str, step: Step) -> None:
    assert isinstance(_translated(getattr(errno, name), step), errors.PeerUnavailable)


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL, errno.EDOM, errno.ENOENT, 0, 99999])
def test_anything_else_is_a_failure_with_its_number(number: int) -> None:
    found = _translated(number, "data")
    assert isinstance(found, failures.CephFailed)
    assert str(number) in str(found)


@pytest.mark.parametrize(
    ("number", "step", "kind"),
    [
        (errno.EACCES, "connect", failures.CephKeyRefused),
        (errno.EINVAL, "connect", failures.CephKeyRefused),
        (errno.EPERM, "data", failures.CephNotPermitted),
        (errno.EDQUOT, "data", failures.CephQuotaReached),
        (errno.ENOSPC, "data", failures.CephQuotaReached),
        (errno.ENOENT, "pool", failures.CephPoolMissing),
        (errno.ETIMEDOUT, "data", failures.CephNotAnswering),
        (errno.ETIMEDOUT, "monitors", failures.CephMonitorsUnreachable),
        (errno.ESHUTDOWN, "data", failures.CephClientBlocklisted),
        (errno.ESTALE, "data", failures.CephImageBusy),
    ],
)
def test_errno_has_its_own_error(number: int, step: Step, kind: type[errors.CrustError]) -> None:
    assert type(_translated(number, step)) is kind
