"""The newc cpio format of an initramfs, written in a fixed order with fixed times: same content, same bytes.

Format: Documentation/driver-api/early-userspace/buffer-format.rst of the kernel. A device node is written as
an entry, so building needs no mknod and no privilege.
"""

import stat
from dataclasses import dataclass

_TRAILER = "TRAILER!!!"


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the archive; `mode` holds the type bits, `device` the numbers of a device node."""

    path: str
    mode: int
    data: bytes = b""
    device: tuple[int, int] = (0, 0)


def directory(path: str) -> Entry:
    """A directory of mode 0755."""
    return Entry(path, stat.S_IFDIR | 0o755)


def file(path: str, data: bytes, *, executable: bool = False) -> Entry:
    """A regular file."""
    return Entry(path, stat.S_IFREG | (0o755 if executable else 0o644), data)


def symlink(path: str, target: str) -> Entry:
    """A symbolic link."""
    return Entry(path, stat.S_IFLNK | 0o777, target.encode())


def character_device(path: str, major: int, minor: int) -> Entry:
    """A character device of mode 0600."""
    return Entry(path, stat.S_IFCHR | 0o600, b"", (major, minor))


def pack(entries: list[Entry]) -> bytes:
    """Write the archive; missing parent directories are added, and a path named twice is kept once."""
    by_path = {entry.path: entry for entry in entries}
    for path in list(by_path):
        for parent in _parents(path):
            by_path.setdefault(parent, directory(parent))
    ordered = sorted(by_path.values(), key=lambda entry: entry.path)
    body = [_record(number, entry) for number, entry in enumerate(ordered, start=1)]
    return b"".join((*body, _record(0, Entry(_TRAILER, 0))))


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


def _record(inode: int, entry: Entry) -> bytes:
    name = entry.path.encode() + b"\0"
    links = 2 if stat.S_ISDIR(entry.mode) else 1
    numbers = (
        inode,
        entry.mode,
        0,
        0,
        links,
        0,
        len(entry.data),
        0,
        0,
        *entry.device,
        len(name),
        0,
    )
    header = b"070701" + b"".join(b"%08X" % n for n in numbers)
    return _padded(header + name) + _padded(entry.data)


def _padded(block: bytes) -> bytes:
    return block + b"\0" * (-len(block) % 4)
