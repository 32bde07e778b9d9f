"""The content of a block device, by its signatures: libblkid's safe probe.

"Safe" means that two signatures which contradict each other are an answer of their own (`Ambiguous`) instead of a
guess: a file of the filesystem may have the bytes of another format, as a disk image has. The answer decides whether
the driver formats a device, so every doubt forbids that. blkid(8) exits with 2 for "nothing found" and for a read
error alike: so the places of superblocks are read here as well.

blkid(8) runs confined, and cannot write: a guest or a pod may have written the bytes. It takes 15 ms; the driver does
not probe a new volume without stored data.
"""

import asyncio
import os
from dataclasses import dataclass

from crust.core import errors
from crust.host.block import devices
from crust.host.process import confined, syscalls

_BLKID_NOTHING, _BLKID_AMBIGUOUS = 2, 8
_LIMITS = confined.Limits(memory_bytes=512 * 1024**2, cpu_s=20, at_once=8)
"""Eight of them may take as much memory as one e2fsck."""
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Blank:
    """No signature, and zeros at every place where a superblock could be (`devices.PROBE_WINDOWS`)."""


@dataclass(frozen=True, slots=True)
class Unsigned:
    """Data at such a place, and no signature that libblkid knows: an interrupted mkfs leaves this, for example."""


@dataclass(frozen=True, slots=True)
class Filesystem:
    """A filesystem of libblkid's type name, "ext4" or "vfat"; the UUID may be empty."""

    type: str
    uuid: str


@dataclass(frozen=True, slots=True)
class Other:
    """A signature other than a filesystem's: "partition table gpt", "raid LVM2_member", "crypto crypto_LUKS"."""

    what: str


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """Signatures of more than one format."""


Signature = Blank | Unsigned | Filesystem | Other | Ambiguous


def describe(signature: Signature) -> str:
    """The content, for messages."""
    if isinstance(signature, Filesystem):
        return signature.type
    if isinstance(signature, Other):
        return signature.what
    if isinstance(signature, Ambiguous):
        return "signatures of more than one format"
    return "nothing" if isinstance(signature, Blank) else "data without a signature"


def probe(path: str) -> Signature:
    """The signature on the device or file. Blocks.

    Raises `NotFound`, `ProbeFailed`, `CannotConfine`, `CrustError` for a device that cannot be read.
    """
    failed = f"cannot probe {path}"
    with syscalls.opened(path, f"cannot open {path}", os.O_NONBLOCK) as fd:
        # a loop device that was detached meanwhile
        if not os.lseek(fd, 0, os.SEEK_END):
            raise errors.RuntimeFailed.named("ProbeFailed", failed, why="it has no size")
    program = ("blkid", "-p", "-o", "export", confined.DEVICE)
    # A loop of its own: this runs in a worker thread, and `commands` bounds time and output.
    blkid = asyncio.run(
        confined.run_confined(program, device=path, limits=_LIMITS, timeout_s=_TIMEOUT_S)
    )
    if blkid.code == _BLKID_NOTHING:
        return Blank() if devices.is_blank(path) else Unsigned()
    if blkid.code not in (0, _BLKID_AMBIGUOUS):
        why = blkid.stderr_tail.strip() or f"blkid exited with {blkid.code}"
        raise errors.RuntimeFailed.named("ProbeFailed", failed, why=why)
    lines = blkid.stdout.decode("utf-8", "replace").splitlines()
    values = dict(line.split("=", 1) for line in lines if "=" in line)
    kind, usage, table = (values.get(name, "") for name in ("TYPE", "USAGE", "PTTYPE"))
    if blkid.code == _BLKID_AMBIGUOUS:
        return Ambiguous()
    if table:
        return Other(f"partition table {table}" + (f" and {kind}" if kind else ""))
    if kind and usage == "filesystem":
        return Filesystem(kind, values.get("UUID", ""))
    return Other(f"{usage or 'signature'} {kind}".strip())
