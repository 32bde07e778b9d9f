"""A secret that the kernel needs for one call, as a key of the calling thread (keyrings(7)).

The kernel's client of Ceph takes a secret in its options, which stay readable in sysfs, or the description of a key,
which it looks up in the thread that maps. A key of the thread's own keyring is seen by no other thread, and it is
invalidated when the block ends: the client has a copy by then.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from crust.core import errors
from crust.host.process import oserrors, syscalls

_THREAD_KEYRING = -1
_INVALIDATE = 21
_NUMBERS = {"x86_64": (248, 250), "aarch64": (217, 219)}
"""add_key(2) and keyctl(2)."""


@contextmanager
def thread_key(kind: str, description: str, payload: bytes) -> Iterator[None]:
    """The key, for calls of this thread inside the block. Raises what the kernel answers, without the payload."""
    add_key, keyctl = _numbers()
    with oserrors.translating(
        f"cannot give the kernel a key of the type {kind}",
        hint="in a container, allow add_key and keyctl: its seccomp profile may refuse them",
    ):
        serial = syscalls.call(
            add_key, kind.encode(), description.encode(), payload, len(payload), _THREAD_KEYRING
        )
    try:
        yield
    finally:
        with oserrors.translating("cannot remove a key from the kernel"):
            syscalls.call(keyctl, _INVALIDATE, serial, 0, 0, 0)


def _numbers() -> tuple[int, int]:
    found = _NUMBERS.get(os.uname().machine)
    if found is None or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise errors.Unsupported(
            "cannot give the kernel a key", why=f"crust does not know how on {os.uname().machine}"
        )
    return found
