"""The kernel's facts about the users of a device, for a proof, and the two changes that gc makes itself.

A proof needs to see every process and mount of the host: in a container without them no proof is possible.
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
    """The users of a block device. `loops` are the loop devices upon it, `others` sentences about the other users."""

    loops: tuple[str, ...]
    others: tuple[str, ...]


class Kernel:
    """The host, for a proof. Every method blocks."""

    def not_visible(self) -> str:
        """The part of the host that cannot be seen from here; empty: all is visible.

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
        """The users of the device now: mounts, processes, other devices, and an exclusive open in any namespace."""
        usage = holders.device_in_use(device)
        sentences = [f"mounted at {mount}" for mount in usage.mounts]
        sentences += [str(holder) for holder in (*usage.holders, *usage.stacked)]
        if not sentences and (refused := _why_not_exclusive(device)):
            sentences.append(refused)
        return Users(usage.loops, tuple(sentences))

    def bound_at(self, device: str) -> tuple[str, ...]:
        """The paths at which the device's node is bound: mounts of the filesystem of /dev whose root is the node."""
        root = f"/{device.removeprefix('/dev/')}"
        mounts = (mount for mount in mountinfo.read_all() if mount.fs_type in ("devtmpfs", "tmpfs"))
        return tuple(
            mount.target
            for mount in mounts
            if mount.root == root or self.device_at(mount.target) == device
        )

    def loops_of(self, path: str) -> tuple[str, ...]:
        """The loop devices with the path as their backing file."""
        return tuple(device.path for device in _loops_of(path))

    def processes_of(self, pod_uid: str) -> tuple[str, ...]:
        """The processes in a control group of the pod.

        By /proc/<pid>/cgroup: `pod<uid>`, with `_` for `-` where systemd makes the groups.
        """
        names = (f"pod{pod_uid}", f"pod{pod_uid.replace('-', '_')}")
        processes = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                text = (process / "cgroup").read_text(encoding="utf-8", errors="replace")
                if any(name in text for name in names):
                    processes.append(f"{arguments.command_of(int(process.name))}[{process.name}]")
        return tuple(processes)

    def detach(self, device: str, path: str) -> None:
        """Detach the loop device, if its backing file is still at the path. Refused while anything has it open.

        The device is compared again, by `loop.detach` and here.
        """
        for loop_device in _loops_of(path):
            if loop_device.path == device:
                loop.detach(loop_device)

    def unmount(self, path: str) -> None:
        """Unmount the path, never lazily. Refused while it is busy."""
        if mountinfo.at(path) is not None:
            mount_api.unmount(path)


def _why_not_exclusive(device: str) -> str:
    """Why the device cannot be opened exclusively now; empty if it can. A failed look proves nothing."""
    try:
        os.close(os.open(device, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
    except OSError as err:
        if err.errno == errno.EBUSY:
            return "opened exclusively, by a user that cannot be seen from here"
        return f"it cannot be opened to look ({err.strerror})"
    return ""


def _loops_of(path: str) -> tuple[loop.LoopDevice, ...]:
    loops = loop.list_named(lambda name: name == os.path.basename(path))
    return tuple(device for device in loops if device.backing == path)
