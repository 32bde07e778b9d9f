"""The users of a volume: processes that have it mounted in their namespace, a file of it open, or it as directory."""

from __future__ import annotations

import os

from . import protocol


def busy_fault(volume: str, path: str = "", number: str = "") -> protocol.Fault:
    """The fault of a volume that cannot be unmounted; finds and names its users by mount path or device number."""
    numbers = _numbers(path) if path else {number}
    users = [_describe(pid) for pid in _pids() if _holds(pid, numbers)]
    who = ", ".join(users[:8]) or "the kernel"
    return protocol.Fault(
        "busy", f"volume {volume} is in use by {who}", "stop the containers that use it first"
    )


def mounted_in_other_namespace(path: str) -> bool:
    """Whether another mount namespace has the filesystem at `path` mounted, which umount(2) does not detect."""
    numbers = _numbers(path)
    return any(_has_mounted(pid, numbers) for pid in _pids() if not _shares_our_mounts(pid))


def _numbers(path: str) -> set[str]:
    """Device numbers of a mount: of stat and of mountinfo, which differ for btrfs."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as source:
        rows = [line.split(" ", 5) for line in source]
    return {_number(path), *(row[2] for row in rows if row[4] == path)}


def _number(path: str) -> str:
    device = os.stat(path).st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def _pids() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())


def _holds(pid: int, numbers: set[str]) -> bool:
    if pid == os.getpid():
        return False
    return _uses(pid, numbers) or (not _shares_our_mounts(pid) and _has_mounted(pid, numbers))


def _shares_our_mounts(pid: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
    except OSError:
        return True


def _has_mounted(pid: int, numbers: set[str]) -> bool:
    try:
        with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="replace") as source:
            return any(line.split(" ", 3)[2] in numbers for line in source)
    except OSError:
        return False


def _uses(pid: int, numbers: set[str]) -> bool:
    paths = [f"/proc/{pid}/cwd", f"/proc/{pid}/root"]
    try:
        paths += [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return False
    return any(_on(path, numbers) for path in paths)


def _on(path: str, numbers: set[str]) -> bool:
    try:
        return _number(path) in numbers
    except OSError:
        return False


def _describe(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as source:
            command = source.read(200).replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        command = "?"
    return f"process {pid} ({command})"
