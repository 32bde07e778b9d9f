"""What a failed test left on the kernel below its directory: mounts and loop devices."""

from crust.host.block import loop
from crust.host.mounts import mount_api, mountinfo


def remove(root: str) -> None:
    """Unmount what is mounted below `root`, the deepest first, and detach the loop devices on its files."""
    for mount in sorted(mountinfo.below(root), key=lambda each: -len(each.target)):
        mount_api.unmount(mount.target)
    for device in loop.list_named(lambda _: True):
        if device.backing.startswith(f"{root}/"):
            loop.detach(device)
