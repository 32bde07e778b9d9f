"""Mounted volumes: one mount per volume, at a path that is a function of its name.

    /run/volumes/<name>            the mount
    /run/state/<name>.json         the request

The kernel is the source of truth about mounts; the state file only stores the request, so that a restarted
agent (see init.py) knows it. A name is the serial number of the disk, or the tag of a shared directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time

from . import devices, filesystems, format, fs_group, linux, luks, mounts, protocol, volume_users
from .freeze import VolumeFreeze
from .ownership import GroupChange

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypedDict

    class Wanted(TypedDict):
        """A mount as it was asked for."""

        fstype: str
        options: list[str]
        read_only: bool
        format: format.Format | None
        encrypted: bool


ROOT = "/run/volumes"
_STATE = "/run/state"
_SHARED = ("9p", "virtiofs")


class Volumes:
    """All volumes of this VM. Operations on one volume are serialized; those on different volumes run in parallel."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._freezes: dict[str, VolumeFreeze] = {}
        self._groups: dict[str, GroupChange] = {}
        self._ending = False
        for name in self.names():
            # An earlier agent may have frozen it, and its watchdog ended with it.
            with contextlib.suppress(OSError):
                filesystems.thaw(self.path(name))

    @staticmethod
    def path(name: str) -> str:
        """Where a volume is mounted."""
        return f"{ROOT}/{name}"

    def names(self) -> list[str]:
        """Names of the mounted volumes; asks no filesystem, because one may hang."""
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as source:
            targets = {line.split(" ", 5)[4] for line in source}
        return sorted(t.removeprefix(f"{ROOT}/") for t in targets if t.startswith(f"{ROOT}/"))

    def mount(self, args: protocol.Args) -> dict[str, Any]:
        """Mount a volume; the same request again succeeds. Faults: conflict, timeout, …"""
        name = args.name("volume")
        wanted: Wanted = {
            "fstype": args.text("fstype", limit=32),
            "options": args.texts("options"),
            "read_only": args.flag("read_only", default=False),
            "format": _format_of(args.optional("format")),
            "encrypted": args.flag("encrypted", default=False),
        }
        passphrase = args.text("passphrase", limit=8192, default="") or None
        timeout_s = args.integer("timeout_s", 0, 3600, 30)
        args.end()
        with self._lock(name):
            self._mount(name, wanted, passphrase, timeout_s)
            return {"usage": filesystems.usage(self.path(name))}

    def own(self, args: protocol.Args) -> dict[str, Any]:
        """Apply an fsGroup; answers after `wait_s` at most, with its progress. Faults: read_only and others."""
        name = args.name("volume")
        gid = args.integer("gid", 0, 2**32 - 2)
        policy = args.text("policy", limit=32)
        wait_s = args.integer("wait_s", 0, 60)
        args.end()
        if policy not in fs_group.POLICIES:
            raise protocol.Fault(
                "bad_request", f"fs_group policy {policy} is none of {fs_group.POLICIES}"
            )
        with self._lock(name):
            change = self._group_change(name, gid, policy)
        return change.progress(wait_s)

    def unmount(self, args: protocol.Args) -> dict[str, Any]:
        """Unmount a volume; absent is success. Faults: busy, naming its users."""
        name = args.name("volume")
        args.end()
        with self._lock(name):
            self._end_group_change(name)
            was_mounted = os.path.ismount(self.path(name))
            if was_mounted:
                self._unmount(name)
            luks.close(name)
            self._check_released(name)
            self._forget(name)
            return {"was_mounted": was_mounted}

    def usage(self, args: protocol.Args) -> dict[str, Any]:
        """Bytes and inodes of a volume. Does not wait for an operation under way."""
        name = args.name("volume")
        args.end()
        return {"usage": filesystems.usage(self._mounted(name))}

    def grow(self, args: protocol.Args) -> dict[str, Any]:
        """Wait until the disk has `disk_bytes` and nothing is frozen; then grow. Faults: timeout, read_only."""
        name = args.name("volume")
        disk_bytes = args.integer("disk_bytes", 1, 2**63 - 1)
        timeout_s = args.integer("timeout_s", 0, 3600, 30)
        args.end()
        with self._lock(name):
            path = self._mounted(name)
            wanted = self._wanted(name)
            if wanted["read_only"]:
                raise protocol.Fault(
                    "read_only", f"volume {name} is mounted read-only and cannot grow"
                )
            disk = self._disk(name)
            actual_bytes = devices.wait_for_size(disk, disk_bytes, timeout_s)
            with self._freeze_of(name).changing():
                usable_bytes = actual_bytes
                if wanted["encrypted"]:
                    luks.resize(name)
                    usable_bytes = luks.usable_bytes(name)
                filesystems.grow(path, wanted["fstype"], usable_bytes)
            return {"usage": filesystems.usage(path), "disk_bytes": actual_bytes}

    def freeze(self, args: protocol.Args) -> dict[str, Any]:
        """Freeze a volume for `thaw_after_s` at most, because the caller may die before it thaws."""
        name = args.name("volume")
        thaw_after_s = args.integer("thaw_after_s", 1, 600)
        args.end()
        volume_freeze = self._freeze_of(name)
        with volume_freeze.serialized():
            volume_freeze.wait_for_change()
            if self._ending:
                raise protocol.Fault("busy", "the machine is shutting down")
            volume_freeze.freeze(self._mounted(name), thaw_after_s)
        return {}

    def thaw(self, args: protocol.Args) -> dict[str, Any]:
        """Thaw a volume; `was_frozen` is false if the watchdog thawed it before."""
        name = args.name("volume")
        args.end()
        volume_freeze = self._freeze_of(name)
        with volume_freeze.serialized():
            return {"was_frozen": volume_freeze.thaw(self._mounted(name))}

    def health(self, args: protocol.Args) -> dict[str, Any]:
        """Whether a volume is abnormal, and why. Does not wait for an operation under way."""
        name = args.name("volume")
        args.end()
        path, wanted = self._mounted(name), self._wanted(name)
        shared = wanted["fstype"] in _SHARED
        # A mount whose disk was removed cannot be found by serial number any more.
        disk = None if shared else devices.find(name) or "(removed)"
        if wanted["encrypted"] and disk != "(removed)":
            disk = luks.device(name) or "(removed)"
        message = filesystems.condition(path, disk, wanted_read_only=wanted["read_only"])
        return {"abnormal": bool(message), "message": message}

    def thaw_all(self, timeout_s: float) -> None:
        """Thaw all volumes and refuse further freezes: a writer that waits for a thaw cannot be killed."""
        self._ending = True
        _at_once(self._thaw, self.names(), timeout_s)

    def unmount_all(self, timeout_s: float) -> list[str]:
        """Unmount everything; returns the names that are still mounted. A volume in use is at least flushed."""
        return _at_once(self._unmount_or_flush, self.names(), timeout_s)

    def _thaw(self, name: str) -> None:
        with self._freeze_of(name).lock:
            self._freeze_of(name).thaw(self.path(name))

    def _unmount_or_flush(self, name: str) -> None:
        try:
            self.unmount(protocol.Args({"volume": name}))
        except (OSError, protocol.Fault):
            filesystems.flush(self.path(name))
            raise

    def _group_change(self, name: str, gid: int, policy: str) -> GroupChange:
        """The change that was begun since the volume was mounted, or a new one."""
        path = self._mounted(name)
        if self._wanted(name)["read_only"]:
            raise protocol.Fault("read_only", f"volume {name} is mounted read-only")
        begun = self._groups.get(name)
        if begun is not None and begun.wanted == (gid, policy) and not begun.failed:
            return begun
        self._end_group_change(name)
        change = self._groups[name] = GroupChange(path, gid, policy, self._freeze_of(name))
        return change

    def _end_group_change(self, name: str) -> None:
        if name in self._groups:
            self._groups[name].cancel()
            del self._groups[name]

    def _mount(self, name: str, wanted: Wanted, passphrase: str | None, timeout_s: float) -> None:
        path = self.path(name)
        if os.path.ismount(path):
            if self._wanted(name) != wanted:
                raise protocol.Fault(
                    "conflict",
                    f"volume {name} is mounted already, with other options",
                    "unmount it first, or ask for the same options",
                )
            return
        shared = wanted["fstype"] in _SHARED
        source = name if shared else _disk_for(name, wanted, timeout_s)
        os.makedirs(path, mode=0o700, exist_ok=True)
        with open(f"{_STATE}/{name}.json", "w", encoding="utf-8") as state:
            json.dump(wanted, state)
        try:
            if wanted["encrypted"]:
                source = _opened(source, name, wanted, passphrase)
            elif wanted["format"] is not None and not shared and not _is_read_only(wanted):
                format.make_if_blank(source, wanted["fstype"], wanted["format"])
            mounts.mount(
                source, path, wanted["fstype"], wanted["options"], read_only=wanted["read_only"]
            )
        except BaseException:
            if wanted["encrypted"]:
                # the unmount that follows tries it again
                with contextlib.suppress(OSError, protocol.Fault):
                    luks.close(name)
            self._forget(name)
            raise

    def _unmount(self, name: str) -> None:
        path = self.path(name)
        if volume_users.mounted_in_other_namespace(path):
            raise volume_users.busy_fault(name, path)
        volume_freeze = self._freeze_of(name)
        with volume_freeze.lock:
            volume_freeze.thaw(path)
            try:
                linux.unmount(path)
            except OSError as err:
                raise volume_users.busy_fault(name, path) from err

    def _check_released(self, name: str) -> None:
        """Check that no namespace has the disk mounted.

        A successful umount(2) concerns this namespace only; unplugging a disk that another namespace has mounted
        loses writes.
        """
        disk = devices.find(name)
        if disk is not None and devices.is_held(disk):
            raise volume_users.busy_fault(name, number=devices.number(disk))

    def _forget(self, name: str) -> None:
        for remove, path in ((os.unlink, f"{_STATE}/{name}.json"), (os.rmdir, self.path(name))):
            with contextlib.suppress(FileNotFoundError):
                remove(path)

    def _mounted(self, name: str) -> str:
        path = self.path(name)
        if not os.path.ismount(path):
            raise protocol.Fault("not_found", f"volume {name} is not mounted", "mount it first")
        return path

    def _disk(self, name: str) -> str:
        disk = devices.find(name)
        if disk is None:
            raise protocol.Fault("not_found", f"the disk of volume {name} was removed")
        return disk

    def _wanted(self, name: str) -> Wanted:
        with open(f"{_STATE}/{name}.json", encoding="utf-8") as state:
            wanted: Wanted = json.load(state)
        return wanted

    def _freeze_of(self, name: str) -> VolumeFreeze:
        with self._guard:
            return self._freezes.setdefault(name, VolumeFreeze())

    def _lock(self, name: str) -> threading.Lock:
        with self._guard:
            return self._locks.setdefault(name, threading.Lock())


def _format_of(args: protocol.Args | None) -> format.Format | None:
    if args is None:
        return None
    options: format.Format = {
        "bytes_per_inode": args.integer("bytes_per_inode", 0, 2**26, 0) or None,
        "reserved_percent": args.integer("reserved_percent", 0, 50, 0),
    }
    args.end()
    return options


def _is_read_only(wanted: Wanted) -> bool:
    return wanted["read_only"] or "ro" in wanted["options"]


def _disk_for(name: str, wanted: Wanted, timeout_s: float) -> str:
    disk = devices.wait_for(name, timeout_s)
    devices.leave_order_to_host(disk)
    if devices.is_read_only(disk) and not _is_read_only(wanted):
        raise protocol.Fault(
            "read_only", f"the disk of volume {name} is read-only", "mount it read-only"
        )
    return f"/dev/{disk}"


def _opened(disk: str, name: str, wanted: Wanted, passphrase: str | None) -> str:
    """The mapping of an encrypted volume; container and filesystem are made if the disk is blank and shall be."""
    wishes = wanted["format"] if not _is_read_only(wanted) else None
    if wishes is None or luks.device(name) is not None or not format.is_blank(disk):
        return luks.open_(disk, name, passphrase, read_only=_is_read_only(wanted))
    format.check_known(wanted["fstype"])
    if passphrase is None:
        raise luks.needed(name)
    luks.make(disk, passphrase)
    mapped = luks.open_(disk, name, passphrase, read_only=False)
    format.make(mapped, wanted["fstype"], wishes)
    return mapped


def _at_once(work: Callable[[str], None], names: list[str], timeout_s: float) -> list[str]:
    """Do the work for each name in a thread; returns the names whose work failed, or has not ended in time."""
    undone = set(names)

    def run(name: str) -> None:
        with contextlib.suppress(OSError, protocol.Fault):
            work(name)
            undone.discard(name)

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    ends_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, ends_s - time.monotonic()))
    return sorted(undone)
