"""What a driver has left on the kernel below a directory: mounts, and loop devices on files."""

import subprocess
from contextlib import suppress

from crust.blockdriver.host import fsfreeze
from crust.core import errors, volumes
from crust.host.block import loop, users
from crust.host.mounts import mount_api, mountinfo


def devices(root: object) -> list[loop.LoopDevice]:
    """The loop devices on files below `root`."""
    every = loop.list_named(lambda _: True)
    return [device for device in every if device.backing.startswith(f"{root}/")]


def remove(root: object, *, keep: str = "") -> None:
    """Unmount what is mounted below `root` but `keep`, the deepest first, and detach the devices.

    A filesystem is thawed first: a frozen one keeps its device, and whoever writes to it, until the machine's end.
    """
    for mount in sorted(mountinfo.below(str(root)), key=lambda mount: -len(mount.target)):
        if mount.target != keep:
            mount_api.unmount(mount.target)
    for device in devices(root):
        with suppress(errors.CrustError):  # it detaches itself when its last user closes it
            _thaw(device)
            loop.detach(device)


def _thaw(device: loop.LoopDevice) -> None:
    if not users.is_held(volumes.BlockSource(device.path, device.identity)):
        return
    argv = ["blkid", "-p", "-o", "value", "-s", "TYPE", device.path]
    probed = subprocess.run(argv, check=False, capture_output=True, text=True)
    if probed.returncode == 0:
        fsfreeze.thaw_unmounted(device.path, probed.stdout.strip())
