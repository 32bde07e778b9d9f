"""The host: its kernel, the driver's programs and libraries, and the node's tools that must not use volumes."""

import re
from collections.abc import Iterator

from crust.cli.doctor.node import Finding, Node, doctor_check, error, ok, warning
from crust.cli.install import shipped
from crust.host.filesystems.mkfs import NEWEST, SUPPORTED, number_in

_LEAST = (5, 15)

_POD_GROUPS = ("kubepods.slice", "kubepods")
_PROGRAMS = {
    "mkfs.ext4": "e2fsprogs",
    "e2fsck": "e2fsprogs",
    "mkfs.xfs": "xfsprogs",
    "mkfs.btrfs": "btrfs-progs",
    "btrfs": "btrfs-progs",
    "bwrap": "bubblewrap",
    "blkid": "util-linux",
}
_LIBRARIES = {"libseccomp.so.2": "libseccomp2"}
_UDEV_RULES = (
    "/etc/udev/rules.d",
    "/run/udev/rules.d",
    "/usr/local/lib/udev/rules.d",
    "/usr/lib/udev/rules.d",
    "/lib/udev/rules.d",
)
_USES_DEVICES_FILE = re.compile(r"^[\s#]*use_devicesfile\s*=\s*([01])", re.MULTILINE)


@doctor_check("kernel")
def version(node: Node) -> Iterator[Finding]:
    """Linux 5.15: openat2(2), and diskseq, which identifies a device."""
    number = number_in(node.release)
    if number < _LEAST:
        yield error(
            f"the kernel is {node.release}",
            "crust identifies a device by its diskseq, which Linux 5.15 and later have",
            "install a newer kernel",
        )
    else:
        yield ok(f"Linux {node.release}")


@doctor_check("loop")
def loop(node: Node) -> Iterator[Finding]:
    """Loop devices, of which crust's own driver makes one per volume."""
    if not node.has_own_driver():
        yield ok("no loop devices are needed: crust's driver does not run here")
    elif node.has("/dev/loop-control"):
        yield ok("the kernel has loop devices")
    else:
        yield error(
            "/dev/loop-control does not exist",
            "crust's driver attaches its volumes as loop devices",
            "modprobe loop, and put it into /etc/modules-load.d; in a container mount the host's /dev",
        )


@doctor_check("rbd")
def rbd(node: Node) -> Iterator[Finding]:
    """The kernel's client of RBD, by which the host itself uses images of a Ceph pool."""
    drivers = node.driver_settings()
    if not any(driver.engine == "rbd" and driver.mode != "controller" for driver in drivers):
        yield ok("no driver with the engine rbd serves as node here")
    elif node.has("/sys/bus/rbd") or _has_module(node.on_host(), "rbd"):
        yield ok("the kernel has rbd: raw block volumes and mounts on the host work")
    else:
        yield warning(
            "the kernel has no rbd",
            "a raw block volume or a mount on the host is refused (NoHostDevice); a hypervisor needs no rbd",
            "install the kernel's module rbd, if pods without a microVM use volumes here",
        )


@doctor_check("filesystems")
def filesystems(node: Node) -> Iterator[Finding]:
    """The filesystems that the host can mount; a guest mounts with its own kernel."""
    node = node.on_host()
    for name in SUPPORTED:
        if _has_module(node, name):
            yield ok(f"the kernel has {name}")
        else:
            yield warning(
                f"the kernel has no {name}",
                f"an ordinary mount of a volume with {name} fails on this node; a guest does not need it",
                f"install the module {name}, if volumes have it",
            )


@doctor_check("mkfs")
def mkfs(node: Node) -> Iterator[Finding]:
    """The kernel may not mount a filesystem of a newer mkfs, unless crust names all its features."""
    if not node.has_own_driver():
        yield ok("no mkfs is needed: crust's driver does not run here")
        return
    for fs_type, newest in NEWEST.items():
        name = f"mkfs.{fs_type}"
        made_for, kernel = number_in(node.version_of(f"{name} -V")), number_in(node.release)
        if made_for > max(kernel, newest):
            yield warning(
                f"{name} is of Linux {made_for[0]}.{made_for[1]}, and the kernel is {node.release}",
                "crust does not name its features yet, and this kernel may not mount them at a first publish",
                "install the version of the kernel's own distribution, or use ext4",
            )
        else:
            yield ok(f"{name} chooses no feature that the kernel does not know")


def _has_module(node: Node, name: str) -> bool:
    if re.search(rf"\b{name}$", node.text("/proc/filesystems"), re.MULTILINE):
        return True
    modules = f"/lib/modules/{node.release}"
    listed = node.text(f"{modules}/modules.builtin") + node.text(f"{modules}/modules.dep")
    return f"/{name}.ko" in listed


@doctor_check("cgroups")
def cgroups(node: Node) -> Iterator[Finding]:
    """Control groups v2 with the io controller, for I/O limits on the host."""
    controllers = node.text("/sys/fs/cgroup/cgroup.controllers").split()
    without = (
        "a volume with I/O limits is refused on the host; for a guest its hypervisor keeps them"
    )
    if not controllers:
        yield warning(
            "control groups v2 are not mounted at /sys/fs/cgroup", without,
            "boot with systemd.unified_cgroup_hierarchy=1; in a container mount the host's /sys/fs/cgroup",
        )  # fmt: skip
    elif "io" not in controllers:
        yield warning("control groups have no io controller", without, "enable it in the kernel")
    elif "io" not in node.text("/sys/fs/cgroup/cgroup.subtree_control").split():
        todo = "echo +io > /sys/fs/cgroup/cgroup.subtree_control"
        yield warning("the io controller is not given to the groups below the root", without, todo)
    elif not any(node.has(f"/sys/fs/cgroup/{name}") for name in _POD_GROUPS):
        todo = "start the kubelet, or set io_cgroup of the driver to the group that holds the pods"
        yield warning("there is no group kubepods.slice or kubepods", without, todo)
    else:
        yield ok("control groups v2 with io, and a group that holds the pods")


@doctor_check("programs")
def programs(node: Node) -> Iterator[Finding]:
    """The programs that driver and proxy run on volumes. Encryption needs none: guests open LUKS themselves."""
    if not node.has_own_driver() and node.kata_settings() is None:
        yield ok(
            "crust's driver does not run here, nor crust kata: nothing needs programs or libraries"
        )
        return
    missing = {name: package for name, package in _PROGRAMS.items() if not node.has_program(name)}
    missing |= {name: each for name, each in _LIBRARIES.items() if not node.has_library(name)}
    for name, package in missing.items():
        yield error(
            f"{name} is not installed",
            "crust's driver, and the proxy for Kata, need it to make, check or read filesystems",
            f"install {package} (Debian)",
        )
    if not missing:
        yield ok("the programs and libraries for filesystems are installed")


def _file(node: Node, name: str) -> str:
    return f"{shipped()}/host/{name}" + (" of the container" if node.root == node.host_root else "")


@doctor_check("udev")
def udev(node: Node) -> Iterator[Finding]:
    """The rule that keeps udev, and the programs that it starts, away from volumes."""
    node = node.on_host()
    if not node.has("/run/udev/control"):
        yield ok("udev does not run here")
    elif any(node.has(f"{rule}/59-crust.rules") for rule in _UDEV_RULES):
        yield ok("udev has the rule 59-crust.rules")
    else:
        yield warning(
            "udev has no rule 59-crust.rules",
            "it reads the data of pods on their volumes, and LVM or md may take a volume: it cannot be detached then",
            f"copy {_file(node, '59-crust.rules')} to /etc/udev/rules.d; udevadm control --reload",
        )


@doctor_check("lvm")
def lvm(node: Node) -> Iterator[Finding]:
    """LVM's own list of devices, or a filter."""
    node = node.on_host()
    if not node.has_program("lvm"):
        yield ok("LVM is not installed")
        return
    text = node.text("/etc/lvm/lvm.conf")
    settings = "\n".join(line.partition("#")[0] for line in text.splitlines())
    # its value, else the default in its comment: 1 in RHEL 9, 0 in Debian 12
    uses_file = _USES_DEVICES_FILE.search(settings) or _USES_DEVICES_FILE.search(text)
    is_used = uses_file is not None and uses_file[1] == "1"
    if "global_filter" in settings:
        yield ok("LVM has a filter")
    elif is_used and node.has("/etc/lvm/devices/system.devices"):
        yield ok("LVM looks at its own devices only")
    else:
        yield warning(
            "LVM looks for volume groups on every device",
            "a scan activates the volume group that a pod wrote on its volume; the volume cannot be detached then",
            f"merge {_file(node, 'lvm.conf')} into /etc/lvm/lvm.conf; its file system.devices must exist",
        )


@doctor_check("multipath")
def multipath(node: Node) -> Iterator[Finding]:
    """multipath makes no map of a volume."""
    node = node.on_host()
    if not node.has_program("multipathd"):
        yield ok("multipath is not installed")
    elif node.has("/etc/multipath/conf.d/crust.conf"):
        yield ok("multipath leaves volumes alone")
    else:
        yield warning(
            "multipath has no /etc/multipath/conf.d/crust.conf",
            "versions before 0.8.7 make a map of a volume, which keeps it busy",
            f"copy {_file(node, 'multipath.conf')} there, unless the wrapped driver itself uses multipath",
        )
