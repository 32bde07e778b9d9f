"""One table from errno to the error that says what happened.

An errno alone decides no status code that a CO acts on. A missing /dev/loop-control does not mean that the volume
does not exist, a pool that is mounted read-only does not mean that the caller may not, and a process without
descriptors does not mean that the node is full. Such errors keep a class that code inside crust can catch (NotFound,
Refused), and a caller outside gets a failure of this process. A call site that knows which CSI object is meant raises
its own error. Where the errno means what it says, the branch gives the code: no space, busy, damaged. EINVAL mostly
answers a mistake of crust, so it is no InvalidRequest.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from crust.core import errors


class FileMissing(errors.NotFound):
    """A file, directory or device that crust needs does not exist."""

    answered_as = errors.RuntimeFailed
    advice = "the message names the path: find out who removed it, or what did not create it"


class FileInTheWay(errors.Conflict):
    """A file or directory exists where crust creates its own, or is not of the expected kind."""

    answered_as = errors.RuntimeFailed
    advice = "look at the path in the message; crust removed nothing"


class DeniedByKernel(errors.Refused):
    """The kernel refuses crust an operation: missing privilege, or a read-only filesystem."""

    answered_as = errors.RuntimeFailed
    advice = "give the process the privilege, or mount the filesystem writable"


class UnsupportedByKernel(errors.Unsupported):
    """The kernel or the filesystem does not offer an operation."""

    answered_as = errors.RuntimeFailed
    advice = "`crust doctor` checks what crust needs of the kernel and of filesystems"


class NameTooLongForKernel(errors.InvalidRequest):
    """A path is longer than the kernel allows."""

    answered_as = errors.RuntimeFailed
    advice = "configure a shorter directory"


class ProcessOutOfResources(errors.Exhausted):
    """This process has no memory or no file descriptors left."""

    answered_as = errors.PeerUnavailable
    advice = "look at the limits of the service (LimitNOFILE, MemoryMax) and at what uses them up"


_ERRORS: dict[int, type[errors.CrustError]] = {
    errno.ENOENT: FileMissing,
    errno.ENXIO: FileMissing,
    errno.ENODEV: FileMissing,
    errno.ESRCH: FileMissing,
    errno.EEXIST: FileInTheWay,
    errno.ENOTDIR: FileInTheWay,
    errno.EISDIR: FileInTheWay,
    errno.EACCES: DeniedByKernel,
    errno.EPERM: DeniedByKernel,
    errno.EROFS: DeniedByKernel,
    errno.ELOOP: DeniedByKernel,
    errno.ENOSYS: UnsupportedByKernel,
    errno.EOPNOTSUPP: UnsupportedByKernel,
    errno.ENOTTY: UnsupportedByKernel,
    errno.ENAMETOOLONG: NameTooLongForKernel,
    errno.ENOMEM: ProcessOutOfResources,
    errno.EMFILE: ProcessOutOfResources,
    errno.ENFILE: ProcessOutOfResources,
    errno.EBUSY: errors.NotReady,
    errno.ETXTBSY: errors.NotReady,
    errno.ENOTEMPTY: errors.NotReady,
    errno.EAGAIN: errors.OperationPending,
    errno.ENOSPC: errors.Exhausted,
    errno.EDQUOT: errors.Exhausted,
    errno.EFBIG: errors.OutOfRange,
    errno.EUCLEAN: errors.Corrupt,
    errno.EBADMSG: errors.Corrupt,
}


def reason(err: OSError) -> str:
    """The text and the name of the errno: "No space left on device (ENOSPC), /a/b"."""
    if err.errno is None:
        return str(err)
    name = errno.errorcode.get(err.errno, str(err.errno))
    # a `HeldPath` says nothing to people; the act that failed names what it leads to
    is_known = isinstance(err.filename, str) and not err.filename.startswith("/proc/self/fd/")
    where = f", {err.filename}" if is_known else ""
    return f"{os.strerror(err.errno)} ({name}){where}"


def translate(err: OSError, what: str, *, hint: str = "") -> errors.CrustError:
    """The error of crust for `err`, with `err` as its cause. `what` is the action that failed."""
    kind = _ERRORS.get(err.errno or 0, errors.RuntimeFailed)
    error = kind(what, why=reason(err), hint=hint)
    error.__cause__ = err
    return error


@contextmanager
def translating(what: str, *, hint: str = "") -> Iterator[None]:
    """Raise the translation of any `OSError` of the block."""
    try:
        yield
    except OSError as error:
        raise translate(error, what, hint=hint) from error
