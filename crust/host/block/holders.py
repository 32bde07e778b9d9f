"""The holders that keep a mount or a device busy, and the error that names them.

Holders are mounts, loop devices, processes, and the devices that LVM, md or multipath built upon a device: if the
bytes of a raw volume look like a part of one, the host's tools may activate it (deploy/host prevents that). The
kernel then holds the device without any process, and only sysfs names the holder.

`crust.host.block.users` looks for the users of a device, `crust.host.mounts.mount_users` for those of a mount.
"""

from dataclasses import dataclass

from crust.core import errors
from crust.core.printable import some
from crust.host import answers


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """A process and its hold: by "cwd", "root", "exe", "fd 3" or "map"; `writes` is known for devices only."""

    pid: int
    command: str
    by: str
    writes: bool = False

    def __str__(self) -> str:
        return f"{self.command}[{self.pid}] by {self.by}"


class DeviceInUse(errors.NotReady):
    """A device or mount has a mount on it, a process that holds it, or another device that the host built upon it.

    `unseen`: why the users cannot be seen.
    """

    def __init__(
        self,
        path: str,
        mounts: tuple[str, ...] = (),
        loops: tuple[str, ...] = (),
        holders: tuple[Holder, ...] = (),
        stacked: tuple[str, ...] = (),
        unseen: answers.NotSeen | None = None,
    ) -> None:
        users = (
            ("mounted at", mounts),
            ("backing", loops),
            ("used by", tuple(map(str, holders))),
            ("part of", stacked),
        )
        hidden = "the kernel does not say what holds it: perhaps a process of another PID namespace"
        if unseen is not None:
            hidden = f"{unseen.what}: {unseen.why}"
        super().__init__(
            f"{path} is in use",
            why=", ".join(f"{how} {some(texts)}" for how, texts in users if texts) or hidden,
        )
        self.path = path
        self.mounts = mounts
        self.loops = loops
        self.holders = holders
        self.stacked = stacked

    @property
    def is_explained(self) -> bool:
        """Whether a user of the device was found. If not, the hold may have lasted a moment only."""
        return bool(self.mounts or self.loops or self.holders or self.stacked)
