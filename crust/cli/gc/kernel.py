"""What the kernel knows of the users of a device, for a proof, and the two changes that gc makes itself.

A proof needs to see every process and mount of the host: in a container without them nothing is proven.
"""

import errno
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from crust.host.block import devices, holders, loop
from crust.host.mounts import mount_api, mountinfo, propagation
from crust.host.process import arguments, syscalls


@dataclass(frozen=True, slots=True)
class Users:
    """Who uses a block device. `loops` are the loop devices upon it, `others` sentences about all other users."""

    loops: tuple[str, ...]
    others: tuple[str, ...]


class Kernel:
    """The host, for a proof. Every method blocks."""

    def not_visible(self) -> str:
        """What of the host cannot be seen from here; empty: nothing is hidden.

        The initial PID namespace sees all processes; its mount namespace is where the kubelet binds.
        """
        if not propagation.host_is_visible():
            return "processes of the host (this process has a PID namespace of its own: hostPID)"
        if not propagation.in_namespace_of_host():
            return "mounts of the host (this process has a mount namespace of its own)"
        try:
            os.listdir("/proc/1/fd")
        except OSError:
            return (
                "open files of other processes (this process is not root, or lacks CAP_SYS_PTRACE)"
            )
        return ""

    def device_at(self, path: str) -> str:
        """The block device that is bound at the path, by its number, under its name in /dev; empty without one."""
        with suppress(FileNotFoundError, NotADirectoryError):
            number = syscalls.block_device_at(path)
            return devices.node_of(number) if number is not None else ""
        return ""

    def users_of(self, device: str) -> Users:
        """Who uses the device now: mounts, processes, other devices; and whether anybody has it open exclusively, in
        whatever namespace.
        """
        found = holders.device_in_use(device)
        others = [f"mounted at {mount}" for mount in found.mounts]
        others += [str(each) for each in (*found.holders, *found.stacked)]
        if not others and (refused := _why_not_exclusive(device)):
            others.append(refused)
        return Users(found.loops, tuple(others))

    def bound_at(self, device: str) -> tuple[str, ...]:
        """Where the device's node is bound: a mount of the filesystem of /dev, whose root is the node."""
        root = f"/{device.removeprefix('/dev/')}"
        found = (each for each in mountinfo.read_all() if each.fs_type in ("devtmpfs", "tmpfs"))
        return tuple(
            each.target
            for each in found
            if each.root == root or self.device_at(each.target) == device
        )

    def loops_of(self, path: str) -> tuple[str, ...]:
        """The loop devices whose backing file is at the path now."""
        return tuple(each.path for each in _loops_of(path))

    def processes_of(self, pod_uid: str) -> tuple[str, ...]:
        """The processes in a control group of the pod.

        By /proc/<pid>/cgroup: `pod<uid>`, with `_` for `-` where systemd makes the groups.
        """
        wanted = (f"pod{pod_uid}", f"pod{pod_uid.replace('-', '_')}")
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                text = (process / "cgroup").read_text(encoding="utf-8", errors="replace")
                if any(each in text for each in wanted):
                    found.append(f"{arguments.command_of(int(process.name))}[{process.name}]")
        return tuple(found)

    def detach(self, device: str, path: str) -> None:
        """Detach the loop device, if its backing file is still at the path. Refused while anything has it open.

        The device is compared again, by `loop.detach` and here.
        """
        for each in _loops_of(path):
            if each.path == device:
                loop.detach(each)

    def unmount(self, path: str) -> None:
        """Remove what is mounted at the path, never lazily. Refused while it is busy."""
        if mountinfo.at(path) is not None:
            mount_api.unmount(path)


def _why_not_exclusive(device: str) -> str:
    """Why the device cannot be opened exclusively now; empty if it can. What cannot be looked at proves nothing."""
    try:
        os.close(os.open(device, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
    except OSError as err:
        if err.errno == errno.EBUSY:
            return "opened exclusively, by what cannot be seen from here"
        return f"it cannot be opened to look ({err.strerror})"
    return ""


def _loops_of(path: str) -> tuple[loop.LoopDevice, ...]:
    named = loop.list_named(lambda name: name == os.path.basename(path))
    return tuple(each for each in named if each.backing == path)
