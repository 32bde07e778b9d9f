"""The kernel: the ELF inside a bzImage, and which modules the guest needs in which order.

QEMU boots the ELF directly (PVH), which skips the firmware and the decompressor. Dependencies are read from
each module's own .modinfo section (`depends=` and `softdep=pre:`), because a kernel package holds no
modules.dep: that file is made by depmod on the machine that installs the package.
"""

import bz2
import lzma
import re
import struct
import subprocess
import zlib
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from examples.kata.guest import faults

_HARD = re.compile(rb"\0depends=([^\0]*)\0")
_SOFT = re.compile(rb"\0softdep=pre: ([^\0]*)\0")

# Modules that must be loaded before the host can reach the agent, and modules of each filesystem for its first mount.
BOOT_MODULES = ("virtio_pci", "virtio_blk", "virtio_console")
FILESYSTEM_MODULES: Mapping[str, tuple[str, ...]] = {
    "9p": ("9pnet_virtio", "9p"),
    "btrfs": ("btrfs",),
    "ext4": ("ext4",),
    "virtiofs": ("virtiofs",),
    "xfs": ("xfs",),
}
# Looked up by the crypto API at mount time under an alias that no dependency names.
_CRYPTO = ("crc32c_generic", "crc32c_intel", "xxhash_generic", "blake2b_generic", "sha256_generic")
_NEEDS_CRYPTO: Mapping[str, tuple[str, ...]] = {
    "btrfs": _CRYPTO,
    "ext4": _CRYPTO[:2],
    "xfs": _CRYPTO[:2],
}


ENCRYPTION_MODULES = ("dm_crypt", "xts", "ecb")
"""The modules that open a LUKS container: the two modes are looked up by the crypto API under an alias."""
_FASTER_ENCRYPTION = ("aesni_intel",)


def extract_vmlinux(image: Path) -> bytes:
    """Return the ELF that a bzImage carries (boot protocol 2.08, x86/boot.rst). Raises UnknownKernelFormat."""
    data = image.read_bytes()
    if data[0x202:0x206] != b"HdrS" or int.from_bytes(data[0x206:0x208], "little") < 0x208:
        raise faults.UnknownKernelFormat(image, "it has no boot header of protocol 2.08 or later")
    setup_sectors = data[0x1F1] or 4
    offset, length = struct.unpack_from("<II", data, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    # The payload ends in its own uncompressed size, four bytes that are no part of the stream.
    elf = _decompress(image, data[start : start + length - 4])
    if elf[:4] != b"\x7fELF":
        raise faults.UnknownKernelFormat(image, "its payload is not an ELF file")
    return elf


def _decompress(image: Path, payload: bytes) -> bytes:
    if payload.startswith(b"\x1f\x8b"):
        return zlib.decompressobj(wbits=31).decompress(payload)
    if payload.startswith(b"\xfd7zXZ"):
        return lzma.LZMADecompressor().decompress(payload)
    if payload.startswith(b"BZh"):
        return bz2.BZ2Decompressor().decompress(payload)
    for magic, program in ((b"\x02\x21\x4c\x18", "lz4"), (b"\x28\xb5\x2f\xfd", "zstd")):
        if payload.startswith(magic):
            return _filter((program, "-dc"), payload)
    raise faults.UnknownKernelFormat(image, f"unknown compression {payload[:4].hex()}")


def _filter(argv: tuple[str, ...], data: bytes) -> bytes:
    try:
        done = subprocess.run(argv, input=data, capture_output=True, check=False)
    except FileNotFoundError as err:
        raise faults.ImageToolFailed(argv, "the program is not installed") from err
    # Trailing bytes after the last block make lz4 complain after it has written everything.
    if not done.stdout:
        raise faults.ImageToolFailed(argv, done.stderr.decode(errors="replace").strip()[-400:])
    return done.stdout


class ModuleTree:
    """The modules of one kernel package, by name."""

    def __init__(self, root: Path) -> None:
        self._paths = {_name(p.name): p for p in sorted(root.rglob("*.ko"))}
        builtin = next(root.rglob("modules.builtin"), None)
        lines = builtin.read_text().splitlines() if builtin else []
        self._builtin = {_name(line.rsplit("/", 1)[-1]) for line in lines}

    def path(self, name: str) -> Path:
        """The file of a module."""
        return self._paths[name]

    def boot_order(self) -> list[str]:
        """Modules to load at boot, in order. Raises KernelModuleMissing."""
        return self.order(BOOT_MODULES)

    def filesystems(self) -> dict[str, list[str]]:
        """Per filesystem that this kernel has, the modules to load before its first mount, in order."""
        known = self._paths.keys() | self._builtin
        present = {fs: mods for fs, mods in FILESYSTEM_MODULES.items() if known.issuperset(mods)}
        return {fs: self._with_crypto(fs, modules) for fs, modules in present.items()}

    def encryption(self) -> list[str]:
        """The modules that open a LUKS container, in order; none if this kernel cannot."""
        known = self._paths.keys() | self._builtin
        if not known.issuperset(ENCRYPTION_MODULES):
            return []
        faster = (name for name in _FASTER_ENCRYPTION if name in self._paths)
        return self.order((*faster, *ENCRYPTION_MODULES))

    def order(self, wanted: Sequence[str]) -> list[str]:
        """`wanted` and all their dependencies, dependencies first, without built-in modules.

        Raises KernelModuleMissing for a name that is neither a module nor built in.
        """
        ordered: list[str] = []
        for name in wanted:
            self._visit(name, ordered, frozenset())
        return ordered

    def _with_crypto(self, fs: str, modules: Sequence[str]) -> list[str]:
        extra = [name for name in _NEEDS_CRYPTO.get(fs, ()) if name in self._paths]
        return self.order((*extra, *modules))

    def _visit(self, name: str, ordered: list[str], above: frozenset[str]) -> None:
        if name in ordered or name in above or name in self._builtin:
            return
        if name not in self._paths:
            raise faults.KernelModuleMissing(name)
        for needed in dependencies(self._paths[name].read_bytes(), self._paths.keys()):
            self._visit(needed, ordered, above | {name})
        ordered.append(name)


def dependencies(module: bytes, known: Set[str]) -> list[str]:
    """Names that a module's .modinfo says must be loaded first; a soft dependency only if it is `known`."""
    hard = _HARD.search(module)
    soft = _SOFT.search(module)
    needed = [_name(n) for n in hard[1].decode().split(",") if n] if hard else []
    wished = [_name(n) for n in soft[1].decode().split()] if soft else []
    return [*(n for n in wished if n in known), *needed]


def _name(file_name: str) -> str:
    """A module's name as the kernel spells it: no suffix, and underscores for dashes."""
    return file_name.partition(".")[0].replace("-", "_")
