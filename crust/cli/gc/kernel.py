"""The kernel's facts about the users of a device, for a proof, and the two changes that gc makes itself.

A proof needs to see every process and mount of the host: in a container without them no proof is possible.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from crust.host import answers
from crust.host.block import devices, loop, openers, users
from crust.host.mounts import mount_api, mountinfo, propagation
from crust.host.process import arguments, syscalls


@dataclass(frozen=True, slots=True)
class Users:
    """The users of a block device. `loops` are the loop devices upon it, `others` sentences about the other users,
    `binds` the paths at which its node is bound.
    """

    loops: tuple[str, ...]
    others: tuple[str, ...]
    binds: tuple[str, ...] = ()


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
        match answers.ask("the open files of all processes", openers.openers):
            case answers.Unseen(error):
                return f"open files of other processes ({error.why}; it needs {openers.NEEDS})"
            case _:
                return ""

    def device_at(self, path: str) -> str:
        """The block device that is bound at the path, by its number, under its name in /dev; empty without one."""
        with suppress(FileNotFoundError, NotADirectoryError):
            number = syscalls.block_device_at(path)
            return devices.node_of(number) if number is not None else ""
        return ""

    def users_of(self, device: str) -> Users:
        """The users of the device now: mounts, processes, other devices, and an exclusive open in any namespace. A
        question without an answer is a user.
        """

        def look() -> users.Users | None:
            source = devices.of_number(os.stat(device).st_rdev)
            return None if source is None else answers.seen(users.of(source))

        match answers.ask(f"the users of {device}", look, absent=syscalls.ABSENT):
            case answers.Present(found) if found is not None:
                sentences = [f"mounted at {mount.target}" for _, mount in found.mounts]
                sentences += map(str, (*found.openers, *found.stacked))
                if found.writes_in_flight:
                    sentences.append(f"{found.writes_in_flight} writes are in flight")
                if found.is_held and not sentences:
                    sentences.append("opened exclusively, by a user that cannot be seen from here")
                binds = tuple(bind.target for bind in found.binds)
                return Users(found.loops, tuple(sentences), binds)
            case answers.Unseen(error):
                return Users((), (str(error),))
            case _:
                return Users((), ())

    def loops_of(self, path: str) -> tuple[str, ...]:
        """The loop devices with the path as their backing file."""
        return tuple(device.path for device in _loops_of(path))

    def processes_of(self, pod_uid: str) -> tuple[str, ...]:
        """The processes in a control group of the pod.

        By /proc/<pid>/cgroup: `pod<uid>`, with `_` for `-` where systemd makes the groups.
        """
        names = (f"pod{pod_uid}", f"pod{pod_uid.replace('-', '_')}")
        processes = []
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            group = answers.ask(
                f"the control group of process {pid}",
                partial(syscalls.read_whole, f"/proc/{pid}/cgroup"),
                absent=syscalls.ABSENT,
            )
            match group:
                case answers.Present(text) if any(name.encode() in text for name in names):
                    processes.append(f"{arguments.command_of(int(pid))}[{pid}]")
                case answers.Unseen(error):
                    processes.append(f"perhaps process {pid} ({error.what}: {error.why})")
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


def _loops_of(path: str) -> tuple[loop.LoopDevice, ...]:
    loops = loop.list_named(lambda name: name == os.path.basename(path))
    return tuple(device for device in loops if device.backing == path)
