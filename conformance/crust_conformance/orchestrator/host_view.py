"""A view of published volumes on the host: mounts, devices, and readable bytes.

Cases look at a volume only by calls and through this class, so that the suite itself can be tested against a
driver in memory.
"""

import os
import stat
import subprocess
from pathlib import Path


class HostView:
    """Inspects paths of the host that the suite runs on. Raises OSError as the kernel does."""

    def mounts_at(self, path: Path) -> int:
        """The number of mounts at `path`."""
        return sum(mount == path for mount in _mounts())

    def mounts_below(self, path: Path) -> list[Path]:
        """Every mount at or below `path`, deepest first."""
        mounts = [mount for mount in _mounts() if mount.is_relative_to(path)]
        return sorted(mounts, key=lambda mount: -len(mount.parts))

    def unmount(self, path: Path) -> None:
        """Remove a remaining mount of the driver, by umount(8): the suite must not depend on the tested code."""
        subprocess.run(["umount", str(path)], check=False, capture_output=True)

    def has(self, path: Path) -> bool:
        """Whether there is anything at `path`, whose parent exists."""
        return path.name in os.listdir(path.parent)

    def is_block(self, path: Path) -> bool:
        """Whether `path` is a block device."""
        return stat.S_ISBLK(path.stat().st_mode)

    def size_bytes(self, path: Path) -> int:
        """The size of the device at `path`, or of the filesystem that is mounted there."""
        if stat.S_ISDIR(path.stat().st_mode):
            usage = os.statvfs(path)
            return usage.f_blocks * usage.f_frsize
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.lseek(fd, 0, os.SEEK_END)
        finally:
            os.close(fd)

    def group_of(self, path: Path) -> int:
        """The group of a directory."""
        return path.stat().st_gid

    def write(self, path: Path, data: bytes, *, offset: int = 0) -> None:
        """Write to the device or the file, and sync."""
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_CREAT, 0o600)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(fd, data[done:], offset + done)
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(self, path: Path, size_bytes: int, *, offset: int = 0) -> bytes:
        """Read from the device, or from the file."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            parts: list[bytes] = []
            while size_bytes > 0 and (part := os.pread(fd, size_bytes, offset)):
                parts.append(part)
                offset += len(part)
                size_bytes -= len(part)
            return b"".join(parts)
        finally:
            os.close(fd)


def _mounts() -> list[Path]:
    lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    points = [point for _, _, _, _, point, *_ in (line.split(b" ") for line in lines)]
    return [Path(os.fsdecode(_unescaped(point))) for point in points]


def _unescaped(field: bytes) -> bytes:
    for code in (b"040", b"011", b"012", b"134"):  # proc(5): space, tab, newline, backslash
        field = field.replace(b"\\" + code, bytes([int(code, 8)]))
    return field
