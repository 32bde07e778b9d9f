"""The clients of crust itself that have an image open for writing: to flatten it, grow it, or take a snapshot.

To whoever looks at an image's watchers they are not unknown: nobody is refused because of them, and fencing does not
cut them off. librbd hands its lock over between them and a hypervisor, and they never write a guest's data.

The object `crust.clients` lies beside the claims (`crust.ceph.claim_object`). For as long as a client has an image
open it has the omap key `<image>/<random>` there, whose value is the client's address. The key of a process that was
killed stays, and its address means nobody any more: no later client has it.
"""

import errno
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from crust.ceph import failures
from crust.ceph.binding import Ioctx, WriteOp, load

OBJECT = "crust.clients"
_MOST = 1000
_FULL = (errno.EDQUOT, errno.ENOSPC)
"""A pool that is full: a snapshot can be deleted all the same, by a client that is unknown meanwhile."""


@contextmanager
def noted(ioctx: Ioctx, image: str, address: str) -> Iterator[None]:
    """Note the client with this address for the time that it has the image open."""
    key = f"{image}/{secrets.token_hex(8)}"
    _change(ioctx, lambda op: ioctx.set_omap(op, (key,), (address.encode(),)), _FULL)
    try:
        yield
    finally:
        _change(ioctx, lambda op: ioctx.remove_omap_keys(op, (key,)), (*_FULL, errno.ENOENT))


def addresses(ioctx: Ioctx, image: str) -> frozenset[str]:
    """Those that have the image open, and those that were killed while they had it."""
    op = ioctx.create_read_op()
    try:
        found, _ = ioctx.get_omap_vals(op, "", f"{image}/", _MOST)
        ioctx.operate_read_op(op, OBJECT)
        return frozenset(bytes(value or b"").decode() for _, value in found)
    except load().failures as err:
        if failures.errno_of(err) == errno.ENOENT:
            return frozenset()
        raise
    finally:
        ioctx.release_read_op(op)


def unknown_clients(ioctx: Ioctx, image: str, look: Callable[[], frozenset[str]]) -> frozenset[str]:
    """Those of the addresses that `look` finds that are not crust's own.

    The notes are read before, because a client may end and remove its note, and after, because one may begin.
    """
    before = addresses(ioctx, image)
    found = look() - before
    return found - addresses(ioctx, image) if found else found


def _change(ioctx: Ioctx, change: Callable[[WriteOp], None], ignored: tuple[int, ...]) -> None:
    op = ioctx.create_write_op()
    try:
        change(op)
        ioctx.operate_write_op(op, OBJECT)
    except load().failures as err:
        if failures.errno_of(err) not in ignored:
            raise
    finally:
        ioctx.release_write_op(op)
