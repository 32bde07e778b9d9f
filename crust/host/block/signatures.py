"""What is on a block device, by its signatures: libblkid's safe probe.

"Safe" means that two signatures which contradict each other are an error instead of a guess. The answer decides
whether a device is formatted, so every doubt is an error.

Two ways with one answer. `probe` is libblkid in this process, 0.8 ms: for a device that nobody but this driver ever
had. `probe_untrusted` is blkid(8), confined, 15 ms: for bytes that a guest or a pod may have written.
"""

import asyncio
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from crust.core import errors
from crust.host.process import confined, oserrors, syscalls

_LIBRARY = "libblkid.so.1"

_SUPERBLOCKS = 1 << 3 | 1 << 5 | 1 << 7 | 1 << 9
"""BLKID_SUBLKS_UUID, TYPE, USAGE and MAGIC of blkid.h."""
_PARTITIONS = 1 << 3
"""BLKID_PARTS_MAGIC."""
_FOUND, _NOTHING, _AMBIGUOUS = 0, 1, -2
_BLKID_NOTHING, _BLKID_AMBIGUOUS = 2, 8
_LIMITS = confined.Limits(memory_bytes=512 * 1024**2, cpu_s=20)
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Blank:
    """No signature that libblkid knows. It does not prove that the device is empty: see `devices.is_blank`."""


@dataclass(frozen=True, slots=True)
class Filesystem:
    """A filesystem of libblkid's type name, "ext4" or "vfat"; the UUID may be empty."""

    type: str
    uuid: str


@dataclass(frozen=True, slots=True)
class Other:
    """A signature other than a filesystem's: "partition table gpt", "raid LVM2_member", "crypto crypto_LUKS"."""

    what: str


Signature = Blank | Filesystem | Other


class AmbiguousSignature(errors.Corrupt):
    """The device carries signatures that contradict each other."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"the content of {path} is ambiguous",
            why="it carries signatures of more than one format",
            hint="find the stale one with wipefs(8); nothing was changed",
        )


class ProbeFailed(errors.RuntimeFailed):
    """The device could not be probed, e.g. because it cannot be read."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"cannot probe {path}", why=why, hint="nothing was changed")


def probe(path: str) -> Signature:
    """What is on the device or file; raises `NotFound`, `AmbiguousSignature`, `ProbeFailed`."""
    with _opened(path) as fd:
        library = _load()
        handle = library.blkid_new_probe()
        if not handle:
            raise ProbeFailed(path, "libblkid is out of memory")
        try:
            return _classify(library, handle, fd, path)
        finally:
            library.blkid_free_probe(handle)


def probe_untrusted(path: str) -> Signature:
    """The same for a device whose bytes somebody else may have written. Blocks; raises `CannotConfine` besides."""
    with _opened(path):
        pass
    program = ("blkid", "-p", "-o", "export", confined.DEVICE)
    # A loop of its own: this runs in a worker thread, and `commands` bounds time and output.
    done = asyncio.run(confined.run(program, device=path, limits=_LIMITS, timeout_s=_TIMEOUT_S))
    if done.code == _BLKID_NOTHING:
        return Blank()
    if done.code == _BLKID_AMBIGUOUS:
        raise AmbiguousSignature(path)
    if done.code:
        raise ProbeFailed(path, done.stderr_tail.strip() or f"blkid exited with {done.code}")
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    values = dict(line.split("=", 1) for line in lines if "=" in line)
    return _signature(path, lambda name: values.get(name, ""))


@contextmanager
def _opened(path: str) -> Iterator[int]:
    """A descriptor of a device that has a size: a loop device that was detached meanwhile has none."""
    with (
        oserrors.translating(f"cannot open {path}"),
        syscalls.closing(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as fd,
    ):
        if not os.lseek(fd, 0, os.SEEK_END):
            raise ProbeFailed(path, "it has no size")
        yield fd


def _classify(library: ctypes.CDLL, handle: int, fd: int, path: str) -> Signature:
    if library.blkid_probe_set_device(handle, fd, 0, 0):
        raise ProbeFailed(path, "its size cannot be read")
    library.blkid_probe_enable_superblocks(handle, 1)
    library.blkid_probe_set_superblocks_flags(handle, _SUPERBLOCKS)
    library.blkid_probe_enable_partitions(handle, 1)
    library.blkid_probe_set_partitions_flags(handle, _PARTITIONS)
    ctypes.set_errno(0)
    result = library.blkid_do_safeprobe(handle)
    if result == _NOTHING:
        return Blank()
    if result == _AMBIGUOUS:
        raise AmbiguousSignature(path)
    if result != _FOUND:
        number = ctypes.get_errno()
        raise ProbeFailed(path, os.strerror(number) if number else "libblkid does not say why")
    return _signature(path, lambda name: _value(library, handle, name.encode()))


def _signature(path: str, value_of: Callable[[str], str]) -> Signature:
    kind, usage, table = value_of("TYPE"), value_of("USAGE"), value_of("PTTYPE")
    if kind and table:
        raise AmbiguousSignature(path)
    if kind and usage == "filesystem":
        return Filesystem(kind, value_of("UUID"))
    return Other(f"partition table {table}" if table else f"{usage or 'signature'} {kind}".strip())


def _value(library: ctypes.CDLL, handle: int, name: bytes) -> str:
    text = ctypes.c_char_p()
    if library.blkid_probe_lookup_value(handle, name, ctypes.byref(text), None):
        return ""
    return (text.value or b"").decode("utf-8", "replace")


@functools.cache
def _load() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_LIBRARY, use_errno=True)
    except OSError as err:
        raise errors.RuntimeFailed(
            f"{_LIBRARY} is not installed", why=str(err), hint="install the package libblkid1"
        ) from err
    pointer, number, text = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
    library.blkid_new_probe.restype = pointer
    library.blkid_free_probe.argtypes = [pointer]
    library.blkid_probe_set_device.argtypes = [pointer, number, ctypes.c_int64, ctypes.c_int64]
    for chain in ("superblocks", "partitions"):
        getattr(library, f"blkid_probe_enable_{chain}").argtypes = [pointer, number]
        getattr(library, f"blkid_probe_set_{chain}_flags").argtypes = [pointer, number]
    library.blkid_do_safeprobe.argtypes = [pointer]
    text_out = ctypes.POINTER(text)
    library.blkid_probe_lookup_value.argtypes = [pointer, text, text_out, pointer]
    return library
