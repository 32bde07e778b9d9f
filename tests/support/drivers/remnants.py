"""What a driver has left on the kernel below a directory: mounts, and loop devices on files."""

from contextlib import suppress

from crust.core import errors
from crust.host.block import loop
from crust.host.mounts import mount_api, mountinfo


def devices(root: object) -> list[loop.LoopDevice]:
    """The loop devices on files below `root`."""
    every = loop.list_named(lambda _: True)
    return [device for device in every if device.backing.startswith(f"{root}/")]


def remove(root: object, *, keep: str = "") -> None:
    """Unmount what is mounted below `root` but `keep`, the deepest first, and detach the devices."""
    for mount in sorted(mountinfo.below(str(root)), key=lambda mount: -len(mount.target)):
        if mount.target != keep:
            mount_api.unmount(mount.target)
    for device in devices(root):
        with suppress(errors.CrustError):  # it detaches itself when its last user closes it
            loop.detach(device)
