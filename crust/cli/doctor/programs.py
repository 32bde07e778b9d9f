"""Programs and libraries that the driver runs, and the node's own tools that must leave volumes alone."""

import re
from collections.abc import Iterator

from crust.cli.doctor.finding import Finding, check, error, ok, warning
from crust.cli.doctor.node import Node

_PROGRAMS = {
    "mkfs.ext4": "e2fsprogs",
    "e2fsck": "e2fsprogs",
    "mkfs.xfs": "xfsprogs",
    "mkfs.btrfs": "btrfs-progs",
    "btrfs": "btrfs-progs",
    "bwrap": "bubblewrap",
}
_LIBRARIES = {"libblkid.so.1": "libblkid1", "libseccomp.so.2": "libseccomp2"}
_UDEV_RULES = (
    "/etc/udev/rules.d",
    "/run/udev/rules.d",
    "/usr/local/lib/udev/rules.d",
    "/usr/lib/udev/rules.d",
    "/lib/udev/rules.d",
)


@check("programs")
def programs(node: Node) -> Iterator[Finding]:
    """What the driver runs on volumes. Encryption needs nothing here: guests open LUKS, with their own cryptsetup."""
    if not node.has_own_driver():
        yield ok("crust's driver does not run here, which alone needs programs and libraries")
        return
    programs = {name: package for name, package in _PROGRAMS.items() if not node.has_program(name)}
    libraries = {
        name: package for name, package in _LIBRARIES.items() if not node.has_library(name)
    }
    for name, package in (programs | libraries).items():
        yield error(
            f"{name} is not installed",
            "crust's driver needs it to make, check or read filesystems",
            f"install {package} (Debian)",
        )
    if not (programs or libraries):
        yield ok("the driver's programs and libraries are installed")


@check("udev")
def udev(node: Node) -> Iterator[Finding]:
    """The rule that keeps udev, and what it starts, off volumes."""
    if not node.at("/run/udev/control").exists():
        yield ok("udev does not run here")
    elif any(node.at(f"{each}/59-crust.rules").exists() for each in _UDEV_RULES):
        yield ok("udev has the rule 59-crust.rules")
    else:
        yield warning(
            "udev has no rule 59-crust.rules",
            "it reads what pods write on their volumes, and LVM or md may take a volume: it cannot be detached then",
            "crust install --systemd, or deploy/host/59-crust.rules in /etc/udev/rules.d; udevadm control --reload",
        )


@check("lvm")
def lvm(node: Node) -> Iterator[Finding]:
    """LVM's own list of devices, or a filter."""
    if not node.has_program("lvm"):
        yield ok("LVM is not installed")
    elif "global_filter" in _without_comments(node.text("/etc/lvm/lvm.conf")):
        yield ok("LVM has a filter")
    elif _uses_devices_file(node) and node.at("/etc/lvm/devices/system.devices").exists():
        yield ok("LVM looks at its own devices only")
    else:
        yield warning(
            "LVM looks for volume groups on every device",
            "a scan activates the volume group that a pod wrote on its volume; the volume cannot be detached then",
            "merge deploy/host/lvm.conf into /etc/lvm/lvm.conf; its file system.devices must exist",
        )


_USES_DEVICES_FILE = re.compile(r"^[\s#]*use_devicesfile\s*=\s*([01])", re.MULTILINE)


def _uses_devices_file(node: Node) -> bool:
    """What lvm.conf says, else what its comment names as the default: 1 in RHEL 9, 0 in Debian 12."""
    text = node.text("/etc/lvm/lvm.conf")
    said = _USES_DEVICES_FILE.search(_without_comments(text)) or _USES_DEVICES_FILE.search(text)
    return said is not None and said[1] == "1"


@check("multipath")
def multipath(node: Node) -> Iterator[Finding]:
    """No map of a volume."""
    if not node.has_program("multipathd"):
        yield ok("multipath is not installed")
    elif node.at("/etc/multipath/conf.d/crust.conf").exists():
        yield ok("multipath leaves volumes alone")
    else:
        yield warning(
            "multipath has no /etc/multipath/conf.d/crust.conf",
            "versions before 0.8.7 make a map of a volume, which keeps it busy",
            "install deploy/host/multipath.conf there, unless the wrapped driver itself uses multipath",
        )


def _without_comments(text: str) -> str:
    return "\n".join(line.partition("#")[0] for line in text.splitlines())
