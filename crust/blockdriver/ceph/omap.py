"""Sorted keys with values on one object of RADOS (omap), read in pages and changed by one compare-and-swap.

A change that compares needs the object: without it librados answers ENOENT to everything. The binding counts the
compared text in characters, so values to compare must be ASCII (digests and cookies, here).
"""

import errno
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from crust.blockdriver.ceph.binding import Ioctx, WriteOp, ignoring, load

_PAGE = 1000


def read(ioctx: Ioctx, name: str, prefix: str) -> Iterator[tuple[str, bytes]]:
    """All keys that begin with `prefix`, without it, and their values, in order. Raises ENOENT without the object."""
    after = ""
    while True:
        page = _found(ioctx, name, ioctx.get_omap_vals, after, prefix, _PAGE)
        for key, value in page:
            yield key.removeprefix(prefix), value
        if len(page) < _PAGE:
            return
        after = page[-1][0]


def read_keys(ioctx: Ioctx, name: str, keys: tuple[str, ...]) -> dict[str, bytes]:
    """The existing ones of `keys`. Raises ENOENT without the object."""
    return dict(_found(ioctx, name, ioctx.get_omap_vals_by_keys, keys))


def _found(
    ioctx: Ioctx, name: str, get: Callable[..., tuple[Iterator[tuple[str, bytes]], int]], *args: Any
) -> list[tuple[str, bytes]]:
    op = ioctx.create_read_op()
    try:
        pairs, _ = get(op, *args)
        ioctx.operate_read_op(op, name)
        return [(key, bytes(value or b"")) for key, value in pairs]
    finally:
        ioctx.release_read_op(op)


def make(ioctx: Ioctx, name: str) -> None:
    """Make the object, if it is absent."""
    idempotent = load().rados.LIBRADOS_CREATE_IDEMPOTENT
    _operate(ioctx, name, lambda op: op.new(idempotent))


def swap(
    ioctx: Ioctx,
    name: str,
    before: Mapping[str, str] | None,
    after: Mapping[str, bytes | None] | None,
) -> bool:
    """Change the object in one step if it is as `before` says; returns whether it was.

    `before` has keys and their values, "" for an absent key; empty: any state, also no object; None: there is no
    object. `after` has keys and their new values, None for keys to remove; None instead of it removes the object,
    also in a full pool. Raises ENOENT without an object to compare, to remove, or to remove keys from alone.
    """

    def change(op: WriteOp) -> None:
        rados = load().rados
        if before is None:
            op.new(rados.LIBRADOS_CREATE_EXCLUSIVE)
        for key, value in (before or {}).items():
            op.omap_cmp(key, value, rados.LIBRADOS_CMPXATTR_OP_EQ)
        if after is None:
            op.remove()
            return
        new_values = {key: value for key, value in after.items() if value is not None}
        removed_keys = tuple(key for key, value in after.items() if value is None)
        if new_values:
            ioctx.set_omap(op, tuple(new_values), tuple(new_values.values()))
        if removed_keys:
            ioctx.remove_omap_keys(op, removed_keys)

    with ignoring(*(() if before == {} else (errno.ECANCELED, errno.EEXIST))):
        _operate(ioctx, name, change)
        return True
    return False


def _operate(ioctx: Ioctx, name: str, change: Callable[[WriteOp], None]) -> None:
    op = ioctx.create_write_op()
    try:
        change(op)
        ioctx.operate_write_op(op, name)
    finally:
        ioctx.release_write_op(op)
