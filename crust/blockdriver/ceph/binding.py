"""librados and librbd by the bindings that Ceph ships for Python, and their errors as errors of crust; stubs/ has the
types of what crust uses of them.

The bindings are two extension modules, `rados` and `rbd`, that a distribution builds for its own Python and that no
package index has. So a program that needs them looks for them once, at its start, and fails then and not at the first
volume. Neither is imported unless the settings name a Ceph cluster.

One table makes the errors, from errno and step. An errno means different things at different steps: ENOENT is an
unknown pool when the pool is opened and a missing image when an image is. A caller that knows the object catches the
errno first (`errno_of`). A timeout says nothing about the outcome: the change may have been made, so a retry looks
first.
"""

import errno
import functools
import importlib
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from crust.core import errors

if TYPE_CHECKING:
    import rados
    import rbd

Rados: TypeAlias = "rados.Rados"
Ioctx: TypeAlias = "rados.Ioctx"
WriteOp: TypeAlias = "rados.WriteOp"
Images: TypeAlias = "rbd.RBD"
Image: TypeAlias = "rbd.Image"


@dataclass(frozen=True, slots=True)
class Binding:
    rados: Any
    rbd: Any

    @property
    def failures(self) -> tuple[type[Exception], type[Exception]]:
        """The errors of their calls; each has `errno`, or none."""
        return (self.rados.Error, self.rbd.Error)

    @property
    def images(self) -> Images:
        """librbd's methods for images by name."""
        return cast("Images", self.rbd.RBD())

    def connection(self, user: str, options: dict[str, str]) -> Rados:
        """A connection that is not open yet; no configuration file is read."""
        return cast("Rados", self.rados.Rados(rados_id=user, conf=options))


@functools.cache
def load() -> Binding:
    """The binding; raises `CephBindingMissing`."""
    modules = {}
    for name in ("rados", "rbd"):
        try:
            modules[name] = importlib.import_module(name)
        except ImportError as err:
            version = ".".join(map(str, sys.version_info[:2]))
            module = f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
            raise errors.NotReady.named(
                "CephBindingMissing",
                f"Ceph cannot be used: this Python {version} has no module {name!r}",
                why=str(err),
                hint="install python3-rados and python3-rbd of a distribution with this Python, and make "
                f"{module} visible to this environment",
            ) from err
    return Binding(modules["rados"], modules["rbd"])


Step = Literal["connect", "pool", "monitors", "data"]
"""The step that failed: connect, open the pool, ask the monitors, read or write."""


class CephMonitorsUnreachable(errors.PeerUnavailable):
    def __init__(self, monitors: str) -> None:
        super().__init__(
            "the Ceph cluster cannot be asked", why=f"no monitor of {monitors} answered in time"
        )


class CephKeyRefused(errors.Refused):
    def __init__(self, user: str) -> None:
        super().__init__(
            f"the Ceph cluster refuses client.{user}",
            why="the user does not exist there, or its key is another one",
            hint=f"compare the key with `ceph auth get-key client.{user}`; a user that was made again has a new key",
        )


class CephNotPermitted(errors.Refused):
    def __init__(self, error_text: str, user: str) -> None:
        super().__init__(
            f"{error_text}: client.{user} may not", why="its capabilities do not cover it"
        )
        self.user = user


class CephPoolMissing(errors.NotReady):
    def __init__(self, pool: str) -> None:
        super().__init__(
            f"the Ceph cluster has no pool {pool!r}", why="the settings or the volume name it"
        )
        self.pool = pool


class CephClientBlocklisted(errors.PeerUnavailable):
    def __init__(self, user: str, address: str = "") -> None:
        where = f", {address}" if address else ""
        super().__init__(
            f"the Ceph cluster has blocklisted this client of client.{user}{where}",
            why="an administrator did it, or another client did, because it did not answer for 30 s",
        )


class CephImageBusy(errors.PeerUnavailable):
    def __init__(self, error_text: str, number: int) -> None:
        super().__init__(
            f"{error_text} now",
            why=f"another client changes the same image: Ceph answered {errno.errorcode[number]} ({number})",
        )


class CephConnectionClosed(errors.PeerUnavailable):
    def __init__(self) -> None:
        super().__init__("the connection to the Ceph cluster is closed")


class CephFailed(errors.RuntimeFailed):
    def __init__(self, error_text: str, number: int) -> None:
        name = errno.errorcode.get(number, "no number")
        super().__init__(f"{error_text} failed", why=f"Ceph answered {name} ({number})")
        self.number = number


UNANSWERED = (
    errno.ETIMEDOUT,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.ENOTCONN,
    errno.EPIPE,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
)
"""The call got no answer, so it may still be carried out."""
_OVERTAKEN = (errno.ESTALE, errno.EAGAIN, errno.EBUSY, errno.ECANCELED, errno.EROFS, errno.EINTR)
"""Another client has renamed, removed or locked the image between two steps of librbd: a retry looks again. EROFS is
a write of a client that has lost librbd's lock, ESTALE an entry of librbd's directory of another image."""


def errno_of(failure: BaseException) -> int:
    """The errno of a failure of the binding; 0 if it has none."""
    number = getattr(failure, "errno", None)
    return abs(number) if isinstance(number, int) else 0


@contextmanager
def ignoring(*numbers: int) -> Iterator[None]:
    """Treat failures with one of these errnos as success: the call had nothing to do."""
    try:
        yield
    except load().failures as err:
        if errno_of(err) not in numbers:
            raise


def translated(
    number: int, error_text: str, *, step: Step, user: str, monitors: str, pool: str
) -> errors.CrustError:
    """The error for an errno. `error_text`, "cannot …", begins its text."""
    if number == errno.ESHUTDOWN:
        return CephClientBlocklisted(user)
    if step == "connect" and number in (errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOENT):
        # EINVAL: the key has an invalid form
        return CephKeyRefused(user)
    if number in UNANSWERED:
        if step != "data":
            return CephMonitorsUnreachable(monitors)
        return errors.PeerUnavailable.named(
            "CephNotAnswering",
            f"{error_text}: the Ceph cluster does not answer",
            why="its OSDs have not answered in time, and may still carry out the request",
        )
    if number in (errno.EACCES, errno.EPERM):
        return CephNotPermitted(error_text, user)
    if number in (errno.EDQUOT, errno.ENOSPC):
        return errors.Exhausted.named(
            "CephQuotaReached",
            f"{error_text}: the Ceph pool is full",
            why="its quota is reached, or the cluster's OSDs are full",
        )
    if step == "pool" and number == errno.ENOENT:
        return CephPoolMissing(pool)
    if number in _OVERTAKEN:
        return CephImageBusy(error_text, number)
    return CephFailed(error_text, number)
