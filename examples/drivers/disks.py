"""Sparse files on loop devices, and filesystems and binds on them, by the commands that other drivers call too."""

import glob
import os
import stat
import subprocess
from collections.abc import Iterator


class CommandFailed(Exception):
    """A command ended with an error; its text is the command's output."""


def run(*command: str) -> str:
    """The output of a command that must succeed."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if ended.returncode:
        raise CommandFailed(f"{' '.join(command)}: {ended.stderr.strip() or ended.stdout.strip()}")
    return ended.stdout.strip()


def make_image(path: str, size: int) -> None:
    """Create or grow a sparse file."""
    with open(path, "ab") as file:
        if file.seek(0, os.SEEK_END) < size:
            file.truncate(size)


def attached() -> Iterator[tuple[str, str]]:
    """The loop devices and their files, from the kernel: losetup(8) may miss one while others come and go."""
    for path in glob.glob("/sys/block/loop*/loop/backing_file"):
        try:
            with open(path, encoding="utf-8") as file:
                yield f"/dev/{path.split('/')[3]}", file.read().rstrip("\n")
        except OSError:  # it was detached meanwhile
            continue


def device_of(image: str) -> str:
    """The loop device of an image; empty if it has none."""
    backing = os.path.realpath(image)
    return next((device for device, file in attached() if file == backing), "")


def attach(image: str) -> str:
    """The loop device of an image, attached if it was not."""
    return device_of(image) or run("losetup", "--find", "--show", image)


def detach(image: str) -> None:
    """Detach the loop device of an image, if it has one."""
    device = device_of(image)
    if device:
        run("losetup", "--detach", device)


def detach_below(directory: str) -> None:
    """Detach the devices of files below a directory, deleted files included."""
    for device, backing in attached():
        if backing.startswith(f"{directory}/"):
            run("losetup", "--detach", device)


def rescan(device: str) -> None:
    """Let the device have the size of its image."""
    run("losetup", "--set-capacity", device)


def is_blank(device: str) -> bool:
    """Whether blkid(8) finds nothing."""
    probe = subprocess.run(["blkid", "-p", device], capture_output=True, timeout=60, check=False)
    return probe.returncode == 2


def format_and_mount(device: str, target: str, fs_type: str, flags: list[str]) -> None:
    """Format and mount as FormatAndMount of mount-utils does."""
    if is_blank(device):
        run(f"mkfs.{fs_type or 'ext4'}", "-q", device)
    os.makedirs(target, exist_ok=True)
    run("mount", "-t", fs_type or "ext4", "-o", ",".join(["defaults", *flags]), device, target)


def grow(device: str, target: str) -> None:
    """Grow the filesystem as ResizeFs of mount-utils does."""
    if run("blkid", "-p", "-o", "value", "-s", "TYPE", device) == "xfs":
        run("xfs_growfs", target)
    else:
        run("resize2fs", device)


def bind_device(device: str, target: str) -> None:
    """A device node on a file; a second one goes on top."""
    if not os.path.lexists(target):
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
    run("mount", "--bind", device, target)


def is_mounted(target: str) -> bool:
    """Whether something is mounted exactly there."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        return any(line.split(" ")[4] == target for line in file)


def unmount_one(target: str) -> None:
    """Take off one layer, if there is one."""
    if is_mounted(target):
        run("umount", target)


def has_binds(device: str) -> bool:
    """Whether the device, or its node, is mounted anywhere."""
    name = os.path.basename(device)
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        return any(
            line.split(" ")[3].endswith(f"/{name}") or f" {device} " in line for line in file
        )


def is_device(path: str) -> bool:
    """Whether there is a block device, or the bind of one."""
    try:
        return stat.S_ISBLK(os.stat(path).st_mode)
    except OSError:
        return False


def size_of(device: str) -> int:
    """The device's size in bytes."""
    return int(run("blockdev", "--getsize64", device))
