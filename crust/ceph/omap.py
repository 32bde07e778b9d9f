"""Sorted keys with values on one object of RADOS (omap), read in pages and changed in one step.

A change that compares needs the object: without it librados answers ENOENT to everything. The comparison of values is
of text that the binding counts in characters, so only ASCII is compared (digests, here).
"""

from collections.abc import Callable, Iterator, Mapping

from crust.ceph import binding
from crust.ceph.binding import Ioctx, WriteOp

_PAGE = 1000


def read(ioctx: Ioctx, name: str, prefix: str) -> Iterator[tuple[str, bytes]]:
    """All keys that begin with `prefix`, without it, and their values, in order. Raises ENOENT without the object."""
    after = ""
    while True:
        page = _page(ioctx, name, prefix, after)
        for key, value in page:
            yield key.removeprefix(prefix), value
        if len(page) < _PAGE:
            return
        after = page[-1][0]


def _page(ioctx: Ioctx, name: str, prefix: str, after: str) -> list[tuple[str, bytes]]:
    op = ioctx.create_read_op()
    try:
        found, _ = ioctx.get_omap_vals(op, after, prefix, _PAGE)
        ioctx.operate_read_op(op, name)
        return [(key, bytes(value or b"")) for key, value in found]
    finally:
        ioctx.release_read_op(op)


def read_keys(ioctx: Ioctx, name: str, keys: tuple[str, ...]) -> dict[str, bytes]:
    """Those of `keys` that there are. Raises ENOENT without the object."""
    op = ioctx.create_read_op()
    try:
        found, _ = ioctx.get_omap_vals_by_keys(op, keys)
        ioctx.operate_read_op(op, name)
        return {key: bytes(value or b"") for key, value in found}
    finally:
        ioctx.release_read_op(op)


def make(ioctx: Ioctx, name: str) -> None:
    """Make the object, if it is not there."""

    def change(op: WriteOp) -> None:
        op.new(binding.load().rados.LIBRADOS_CREATE_IDEMPOTENT)

    _operate(ioctx, name, change)


def put(
    ioctx: Ioctx,
    name: str,
    values: Mapping[str, bytes],
    *,
    dropped: tuple[str, ...] = (),
    expected: Mapping[str, str] | None = None,
    new: bool = False,
) -> None:
    """Set keys, and remove those in `dropped`, if those in `expected` have that value now, "" for absent; else
    ECANCELED. Without `expected` the object is made if it is not there.

    With `new` the object is made, and must not be there: EEXIST.
    """

    def change(op: WriteOp) -> None:
        if new:
            op.new(binding.load().rados.LIBRADOS_CREATE_EXCLUSIVE)
        _compare(op, expected)
        ioctx.set_omap(op, tuple(values), tuple(values.values()))
        if dropped:
            ioctx.remove_omap_keys(op, dropped)

    _operate(ioctx, name, change)


def drop(
    ioctx: Ioctx, name: str, keys: tuple[str, ...], *, expected: Mapping[str, str] | None = None
) -> None:
    """Remove keys, as `put` sets them; absent is a success, unless it is expected."""

    def change(op: WriteOp) -> None:
        _compare(op, expected)
        ioctx.remove_omap_keys(op, keys)

    _operate(ioctx, name, change)


def remove(ioctx: Ioctx, name: str, *, expected: Mapping[str, str] | None = None) -> None:
    """Remove the object with its keys, also in a full pool, if those in `expected` have that value now.

    Else ECANCELED; ENOENT without object.
    """

    def change(op: WriteOp) -> None:
        _compare(op, expected)
        op.remove()

    _operate(ioctx, name, change)


def _compare(op: WriteOp, expected: Mapping[str, str] | None) -> None:
    for key, value in (expected or {}).items():
        op.omap_cmp(key, value, binding.load().rados.LIBRADOS_CMPXATTR_OP_EQ)


def _operate(ioctx: Ioctx, name: str, change: Callable[[WriteOp], None]) -> None:
    op = ioctx.create_write_op()
    try:
        change(op)
        ioctx.operate_write_op(op, name)
    finally:
        ioctx.release_write_op(op)
