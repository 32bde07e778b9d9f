"""The environment of a container: its namespaces, root filesystem, volumes and capabilities.

Runs in a child of PID 1 between fork and exec. The root is a small tmpfs with the guest's own programs bound
into it read-only. Volumes are bound at their destinations; a subPath is resolved with openat2(2) so that no
link in the volume leads out of it, and bound by descriptor, so that it cannot be replaced in between. The
guest's volume directory is detached from the namespace: a container sees and pins only its own volumes.

The security boundary is the VM. Inside it, containers are uid 0 of the guest, so the files of /proc by which uid 0
changes the kernel (core_pattern runs a program outside of all containers) are read-only or covered, as OCI runtimes
do. The guest's own mounts are detached for the same reason: while a plain /proc is anywhere in the mount namespace,
even out of reach, the kernel lets a user namespace mount a writable /proc (mount_too_revealing, fs/namespace.c).

The initramfs cannot be pivoted away (pivot_root(2) refuses rootfs), hence MS_MOVE and chroot.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat

from . import linux, protocol, volumes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypedDict

    class Mount(TypedDict):
        """A volume, or a path inside it, bound into a container."""

        volume: str
        sub_path: str
        destination: str
        read_only: bool

    class Spec(TypedDict):
        """A container, checked already."""

        command: list[str]
        environment: list[str]
        directory: str
        uid: int
        gid: int
        groups: list[int]
        mounts: list[Mount]


_ROOT = "/run/root"
_PROGRAMS = ("bin", "etc", "lib", "lib64", "usr")
_DEVICES = ("full", "null", "random", "tty", "urandom", "zero")
_DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}
# The lists of OCI runtimes (runtime-spec, config-linux.md). Files that the guest's kernel lacks are left out.
_READ_ONLY = ("proc/bus", "proc/fs", "proc/irq", "proc/sys", "proc/sysrq-trigger")
_COVERED = (
    "proc/acpi",
    "proc/asound",
    "proc/interrupts",
    "proc/kallsyms",
    "proc/kcore",
    "proc/keys",
    "proc/kmsg",
    "proc/kpagecgroup",
    "proc/kpagecount",
    "proc/kpageflags",
    "proc/latency_stats",
    "proc/sched_debug",
    "proc/scsi",
    "proc/timer_list",
    "proc/timer_stats",
    "sys/devices/virtual/powercap",
    "sys/firmware",
)
_GUEST_DIRECTORIES = ("/dev", "/proc", "/sys", "/tmp", "/run")
# chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap, net_bind_service, sys_chroot, setfcap
# (capability.h). Without mknod and sys_admin a container cannot reach a disk that it was not given.
_KEPT_CAPABILITIES = frozenset((0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 31))
_INSIDE_VOLUME = linux.RESOLVE_BENEATH | linux.RESOLVE_NO_MAGICLINKS | linux.RESOLVE_NO_XDEV
_PLAIN = linux.RESOLVE_BENEATH | linux.RESOLVE_NO_SYMLINKS


def enter(spec: Spec) -> None:
    """Become the container. Faults: refused, not_found; raises OSError. The caller execs or exits next."""
    os.setsid()
    os.umask(0o022)
    linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS)
    linux.mount("", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    _build_root()
    for mount in spec["mounts"]:
        _bind(mount)
    os.chdir(_ROOT)
    linux.mount(".", "/", "", linux.MS_MOVE)
    # The working directory is the new root by now; absolute paths still lead to the old one.
    for path in _GUEST_DIRECTORIES:
        linux.unmount(path, linux.MNT_DETACH)
    os.chroot(".")
    os.chdir(spec["directory"])
    _restrict(spec)


def _build_root() -> None:
    os.makedirs(_ROOT, exist_ok=True)
    linux.mount("tmpfs", _ROOT, "tmpfs", linux.MS_NOSUID, "mode=755,size=64m")
    for name in _PROGRAMS:
        _bind_path(f"/{name}", f"{_ROOT}/{name}", read_only=True)
    for name in ("dev", "proc", "root", "run", "sys", "tmp", "var"):
        os.mkdir(f"{_ROOT}/{name}")
    hard = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    linux.mount("proc", f"{_ROOT}/proc", "proc", hard)
    linux.mount("sysfs", f"{_ROOT}/sys", "sysfs", hard | linux.MS_RDONLY)
    _protect_kernel()
    for name in _DEVICES:
        _bind_path(f"/dev/{name}", f"{_ROOT}/dev/{name}", read_only=False)
    for name, target in _DEVICE_LINKS.items():
        os.symlink(target, f"{_ROOT}/dev/{name}")
    os.mkdir(f"{_ROOT}/dev/shm")
    for name in ("dev/shm", "tmp"):
        os.chmod(f"{_ROOT}/{name}", 0o1777)


def _protect_kernel() -> None:
    for path in (f"{_ROOT}/{name}" for name in _READ_ONLY):
        if os.path.exists(path):
            with _opened(os.open(path, os.O_PATH)) as fd:
                _attach(fd, fd, linux.MOUNT_ATTR_RDONLY)
    for path in (f"{_ROOT}/{name}" for name in _COVERED):
        if os.path.isdir(path):
            linux.mount("tmpfs", path, "tmpfs", linux.MS_RDONLY, "mode=755,size=4k")
        elif os.path.exists(path):
            null = os.open("/dev/null", os.O_PATH)
            with _opened(null), _opened(os.open(path, os.O_PATH)) as place:
                _attach(null, place, 0)


def _bind_path(source: str, target: str, *, read_only: bool) -> None:
    if os.path.isdir(source):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC))
    with _opened(os.open(source, os.O_PATH)) as fd, _opened(os.open(target, os.O_PATH)) as place:
        _attach(fd, place, linux.MOUNT_ATTR_RDONLY if read_only else 0)


def _bind(mount: Mount) -> None:
    with _opened(_source(mount)) as source:
        is_directory = stat.S_ISDIR(os.fstat(source).st_mode)
        with _opened(_destination(mount["destination"], is_directory=is_directory)) as place:
            # A hostile volume may carry device nodes of the guest's other disks.
            attributes = linux.MOUNT_ATTR_NODEV
            if mount["read_only"]:
                attributes |= linux.MOUNT_ATTR_RDONLY
            _attach(source, place, attributes)


def _attach(source: int, place: int, attributes: int) -> None:
    with _opened(linux.clone_mount(source)) as detached:
        if attributes:
            linux.set_mount_attributes(detached, attributes)
        linux.attach_mount(detached, place)


def _source(mount: Mount) -> int:
    path = f"{volumes.ROOT}/{mount['volume']}"
    if not os.path.ismount(path):
        raise protocol.Fault(
            "not_found", f"volume {mount['volume']} is not mounted", "mount it first"
        )
    root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if not mount["sub_path"]:
        return root
    with _opened(root):
        return resolve_sub_path(root, mount["sub_path"], create=not mount["read_only"])


def resolve_sub_path(root: int, sub_path: str, *, create: bool) -> int:
    """Open `sub_path` of the volume opened as `root`; create missing directories if `create`.

    Links are followed as long as they stay inside the volume. New directories get the mode of the volume's
    root, as the kubelet does. Faults: refused, not_found.
    """
    parts = [p for p in sub_path.split("/") if p not in ("", ".")]
    if sub_path.startswith("/") or ".." in parts:
        raise protocol.Fault("refused", f"subPath {sub_path!r} is not a path inside the volume")
    try:
        return _open_or_make(root, parts, create=create)
    except OSError as err:
        fault = protocol.fault_of(err, f"resolving subPath {sub_path!r}")
        hint = "a link in it leads out of the volume" if fault.code == "refused" else ""
        raise protocol.Fault(fault.code, fault.message, hint) from err


def _open_or_make(root: int, parts: list[str], *, create: bool) -> int:
    try:
        fd = linux.open_beneath(root, "/".join(parts) or ".", os.O_PATH, _INSIDE_VOLUME)
    except FileNotFoundError:
        if not create:
            raise
        with _opened(_open_or_make(root, parts[:-1], create=True)) as parent:
            mode = stat.S_IMODE(os.fstat(root).st_mode) & 0o777
            _make_directory(parent, parts[-1], mode)
        return linux.open_beneath(root, "/".join(parts), os.O_PATH, _INSIDE_VOLUME)
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        os.close(fd)
        raise protocol.Fault("refused", "subPath is neither a directory nor a regular file")
    return fd


def _destination(path: str, *, is_directory: bool) -> int:
    """Create and open the mount point of a container's path without following links."""
    parts = [p for p in path.split("/") if p]
    place = os.open(_ROOT, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for index, part in enumerate(parts):
        with _opened(place) as parent:
            if is_directory or index < len(parts) - 1:
                _make_directory(parent, part, 0o755)
            else:
                _make_file(parent, part)
            place = linux.open_beneath(parent, part, os.O_PATH, _PLAIN)
    return place


def _make_directory(parent: int, name: str, mode: int) -> None:
    with contextlib.suppress(FileExistsError):
        previous = os.umask(0)
        try:
            os.mkdir(name, mode, dir_fd=parent)
        finally:
            os.umask(previous)


def _make_file(parent: int, name: str) -> None:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    with contextlib.suppress(FileExistsError):
        os.close(os.open(name, flags, 0o644, dir_fd=parent))


def _restrict(spec: Spec) -> None:
    with open("/proc/sys/kernel/cap_last_cap", encoding="utf-8") as source:
        last = int(source.read())
    for capability in range(last + 1):
        if capability not in _KEPT_CAPABILITIES:
            linux.drop_capability(capability)
    os.setgroups(spec["groups"])
    os.setgid(spec["gid"])
    os.setuid(spec["uid"])
    linux.forbid_new_privileges()
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


@contextlib.contextmanager
def _opened(fd: int):  # type: ignore[no-untyped-def]  # collections.abc is not worth its import here
    try:
        yield fd
    finally:
        os.close(fd)
