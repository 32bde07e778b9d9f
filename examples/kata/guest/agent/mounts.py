"""Mounting a filesystem, with the kernel's own message when it fails.

Options are those of mount(8). Mount attributes are separated from filesystem options here; the filesystem refuses
options that it does not know. Options of other tools (`_netdev`, `x-*`) are dropped; options that would make this
another operation (`bind`, `remount`, `loop`) are refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading

from . import linux, protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TypedDict

    class Plan(TypedDict):
        """Which modules to load, in order; `encryption` is empty if the kernel has no dm-crypt."""

        boot: list[str]
        filesystems: dict[str, list[str]]
        encryption: list[str]


_PLAN = "/lib/modules/plan.json"
_ATTRIBUTES = {
    "nosuid": linux.MOUNT_ATTR_NOSUID,
    "nodev": linux.MOUNT_ATTR_NODEV,
    "noexec": linux.MOUNT_ATTR_NOEXEC,
    "noatime": linux.MOUNT_ATTR_NOATIME,
    "strictatime": linux.MOUNT_ATTR_STRICTATIME,
    "nodiratime": linux.MOUNT_ATTR_NODIRATIME,
}
_MEANINGLESS = "defaults rw suid dev exec atime relatime norelatime nostrictatime diratime async"
_FSTAB_OPTIONS = "auto noauto user nouser nofail _netdev"
_DEFAULTS = frozenset(f"{_MEANINGLESS} {_FSTAB_OPTIONS}".split())
_REFUSED = frozenset(("bind", "rbind", "move", "remount", "loop", "shared", "slave", "private"))
_load = threading.Lock()


def split(options: list[str]) -> tuple[int, list[str], bool]:
    """Mount attributes, options for the filesystem, and whether `ro` was among them. Faults: bad_request."""
    attributes, rest, read_only = 0, [], False
    for option in options:
        if option in _ATTRIBUTES:
            attributes |= _ATTRIBUTES[option]
        elif option == "ro":
            read_only = True
        elif option in _REFUSED or "," in option or not option:
            raise protocol.Fault(
                "bad_request", f"mount option {option!r} is not possible in a guest"
            )
        elif option not in _DEFAULTS and not option.startswith(("x-", "X-", "comment=")):
            rest.append(option)
    return attributes, rest, read_only


def known_filesystems() -> list[str]:
    """Filesystems that this guest can mount."""
    return sorted(_plan()["filesystems"])


def mount(source: str, target: str, fstype: str, options: list[str], *, read_only: bool) -> None:
    """Mount `source` at `target`. Faults: unsupported, bad_request, io_error and others, with the kernel's reason."""
    _load_filesystem(fstype)
    attributes, rest, ro_option = split(options)
    if read_only or ro_option:
        attributes |= linux.MOUNT_ATTR_RDONLY
        rest = ["ro", *rest]
    with _kernel_log() as log:
        context = linux.FilesystemContext(fstype)
        try:
            _attach(context, source, target, rest, attributes)
        except OSError as err:
            reason = context.complaints() or log.since()
            fault = protocol.fault_of(err, f"mounting {fstype}")
            hint = f"the kernel says: {reason}" if reason else "look at the console of the VM"
            raise protocol.Fault(fault.code, fault.message, hint) from err
        finally:
            context.close()


def _attach(
    context: linux.FilesystemContext, source: str, target: str, rest: list[str], attributes: int
) -> None:
    context.set_string("source", source)
    for option in rest:
        key, equals, value = option.partition("=")
        if equals:
            context.set_string(key, value)
        else:
            context.set_flag(key)
    mount_fd = context.create(attributes)
    target_fd = os.open(target, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        linux.attach_mount(mount_fd, target_fd)
    finally:
        os.close(target_fd)
        os.close(mount_fd)


def _load_filesystem(fstype: str) -> None:
    modules = _plan()["filesystems"].get(fstype)
    if modules is None:
        known = ", ".join(known_filesystems())
        raise protocol.Fault(
            "unsupported", f"this guest cannot mount {fstype}", f"it knows {known}"
        )
    with _load:
        for name in modules:
            linux.load_module(f"/lib/modules/{name}.ko")


def load_encryption() -> None:
    """Load the modules that open LUKS containers. Faults: unsupported."""
    modules = _plan()["encryption"]
    if not modules:
        raise protocol.Fault("unsupported", "this guest's kernel has no dm-crypt")
    with _load:
        for name in modules:
            linux.load_module(f"/lib/modules/{name}.ko")


def load_boot_modules() -> None:
    """Load the modules through which the host reaches the agent."""
    for name in _plan()["boot"]:
        linux.load_module(f"/lib/modules/{name}.ko")


def _plan() -> Plan:
    with open(_PLAN, encoding="utf-8") as source:
        plan: Plan = json.load(source)
    return plan


class _KernelLog:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def since(self) -> str:
        """Warnings and errors since the log was opened, the last few."""
        lines: list[str] = []
        with contextlib.suppress(OSError):
            while len(lines) < 64:
                header, _, text = os.read(self._fd, 8192).decode(errors="replace").partition(";")
                if int(header.partition(",")[0]) & 7 <= 4:
                    lines.append(text.partition("\n")[0])
        return "; ".join(lines[-3:])


@contextlib.contextmanager
def _kernel_log() -> Iterator[_KernelLog]:
    fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.lseek(fd, 0, os.SEEK_END)
        yield _KernelLog(fd)
    finally:
        os.close(fd)
