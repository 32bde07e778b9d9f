"""One table from errno to the error that says what the caller should do.

EINVAL is not mapped to InvalidRequest on purpose: mostly it answers a mistake of crust, and a CO never retries
INVALID_ARGUMENT. Where it does mean an invalid request (mount options), the call site raises its own error.
"""

import errno
import os
from types import TracebackType

from crust import errors

_BRANCHES: dict[int, type[errors.CrustError]] = {
    errno.ENOENT: errors.NotFound,
    errno.ENXIO: errors.NotFound,
    errno.ENODEV: errors.NotFound,
    errno.ESRCH: errors.NotFound,
    errno.EEXIST: errors.Conflict,
    errno.ENOTDIR: errors.Conflict,
    errno.EISDIR: errors.Conflict,
    errno.EBUSY: errors.NotReady,
    errno.ETXTBSY: errors.NotReady,
    errno.ENOTEMPTY: errors.NotReady,
    errno.EAGAIN: errors.OperationPending,
    errno.ENOSPC: errors.Exhausted,
    errno.EDQUOT: errors.Exhausted,
    errno.ENOMEM: errors.Exhausted,
    errno.EMFILE: errors.Exhausted,
    errno.ENFILE: errors.Exhausted,
    errno.EFBIG: errors.OutOfRange,
    errno.EACCES: errors.Refused,
    errno.EPERM: errors.Refused,
    errno.EROFS: errors.Refused,
    errno.ELOOP: errors.Refused,
    errno.ENAMETOOLONG: errors.InvalidRequest,
    errno.ENOSYS: errors.Unsupported,
    errno.EOPNOTSUPP: errors.Unsupported,
    errno.ENOTTY: errors.Unsupported,
    errno.EUCLEAN: errors.Corrupt,
    errno.EBADMSG: errors.Corrupt,
}


def reason(err: OSError) -> str:
    """The text and the name of the errno: "No space left on device (ENOSPC), /a/b"."""
    if err.errno is None:
        return str(err)
    name = errno.errorcode.get(err.errno, str(err.errno))
    where = f", {os.fspath(err.filename)}" if isinstance(err.filename, str) else ""
    return f"{os.strerror(err.errno)} ({name}){where}"


def translate(err: OSError, what: str, *, hint: str = "") -> errors.CrustError:
    """The error that stands for `err`, with `err` as its cause. `what` is the act that failed."""
    branch = _BRANCHES.get(err.errno or 0, errors.RuntimeFailed)
    error = branch(what, why=reason(err), hint=hint)
    error.__cause__ = err
    return error


class translating:
    """Raise the translation of any `OSError` of the block.

    A class, because a publish enters about twenty of them, and a generator costs more than most of the blocks.
    """

    __slots__ = ("_hint", "_what")

    def __init__(self, what: str, *, hint: str = "") -> None:
        self._what = what
        self._hint = hint

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, OSError):
            raise translate(error, self._what, hint=self._hint) from error
