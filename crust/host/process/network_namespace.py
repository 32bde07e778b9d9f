"""The host's network namespace, for one thread and a few calls.

A client in the kernel lives in the network namespace of the thread that makes it. A pod's ends with the pod, and the
client would lose its network while others use its device. So what outlives this process is made in the host's: the
initial one, or that of process 1, where it is another's (a pod with hostPID).
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from crust.host.process import oserrors

_CLONE_NEWNET = 0x40000000
_OWN, _FIRST = "/proc/thread-self/ns/net", "/proc/1/ns/net"
_INITIAL_ONLY = "/proc/sys/net/core/dev_weight"
"""A setting that no other network namespace has."""
_setns = ctypes.CDLL(None, use_errno=True).setns


def sees_host() -> bool:
    """Whether this thread is in the host's network namespace, or can enter it."""
    return os.path.exists(_INITIAL_ONLY) or not _is_first()


@contextmanager
def of_host() -> Iterator[None]:
    """Run the block in it; the caller has asked `sees_host`."""
    with oserrors.translating("cannot use the host's network namespace"):
        if os.path.exists(_INITIAL_ONLY) or _is_first():
            host = own = -1
        else:
            own = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
            host = os.open(_FIRST, os.O_RDONLY | os.O_CLOEXEC)
    if host < 0:
        yield
        return
    try:
        _enter(host)
        try:
            yield
        finally:
            _enter(own)
    finally:
        os.close(host)
        os.close(own)


def _is_first() -> bool:
    with oserrors.translating("cannot look at the network namespaces"):
        return os.path.samefile(_OWN, _FIRST)


def _enter(descriptor: int) -> None:
    with oserrors.translating("cannot enter a network namespace"):
        if _setns(descriptor, _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
