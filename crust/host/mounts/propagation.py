"""Whether the host, and so the CO and the runtimes, see the mounts of this process below a directory.

mount(2) reports no error for a mount that does not propagate: only this process would see a guard, and the host's
directory would be open. So daemons check before they serve (mount_namespaces(7)):

- a mount with `master:` is a slave: mounts made here do not reach the host. A systemd unit with PrivateTmp= or
  ProtectSystem= gets it, a pod with HostToContainer, and `ctr` with an `rshared` bind alone;
- a mount with neither `shared:` nor `master:` is private: only its own mount namespace sees mounts on it;
- a mount with `shared:` alone is the host's own group, if the host's process 1 (where it is visible) has it too.

In the host's own mount namespace propagation does not matter: it is the initial one, or that of process 1 of the
initial PID namespace.
"""

import errno
import os
from collections.abc import Collection, Iterable

from crust.core import errors
from crust.host import answers
from crust.host.mounts import mountinfo
from crust.host.process import hidden, syscalls

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO of linux/proc_ns.h."""

_INITIAL_MOUNT_NAMESPACE = "mnt:[4026531832]"
"""MNT_NS_INIT_INO: from Linux 6.18 on. Older kernels chose any number, which process 1 shows."""

_HIDDEN = (*hidden.HIDDEN, errno.ENOENT)
"""The kernel hides process 1, which runs: then the mounts themselves decide."""

_BELOW = ("", "pods", "plugins")
"""Directories of a kubelet's root where volumes are published and staged; each may be a mount of its own."""


def check_seen(path: str) -> None:
    """Raise `MountsNotSeen` unless this process sees the host's mounts below `path`. Blocks."""
    if in_namespace_of_host():
        return
    mount = _mount_of(path)
    if not (mount.peer_group or mount.master):
        raise errors.NotReady.named(
            "MountsNotSeen",
            f"mounts that a driver makes below {path} would not be seen here",
            why=f"the mount at {mount.target} is private to this mount namespace (neither shared: nor master:)",
        )


def check_propagation(roots: Iterable[str]) -> None:
    """Raise `MountsNotPropagated` unless mounts below each of `roots` reach the host. Blocks."""
    if in_namespace_of_host():
        return
    for path in (os.path.join(root, name).rstrip("/") or "/" for root in roots for name in _BELOW):
        mount = _mount_of(path)
        if mount.master:
            why = "is a slave of the host's (master: in mountinfo)"
        elif not mount.peer_group:
            why = "is private to this mount namespace (not shared:)"
        elif (groups := _groups_of_host()) and mount.peer_group not in groups:
            why = "is shared with nobody on the host"
        else:
            continue
        raise errors.NotReady.named(
            "MountsNotPropagated",
            f"mounts below {path} would not reach the host",
            why=f"the mount at {mount.target} {why}",
        )


def _mount_of(path: str) -> mountinfo.Mount:
    """The mount that a directory lies on, or its nearest parent that exists."""
    mount = mountinfo.holding(os.path.realpath(path))
    assert mount is not None, "every path lies on a mount"
    return mount


def host_is_visible() -> bool:
    return os.readlink("/proc/self/ns/pid") == _INITIAL_PID_NAMESPACE


def in_namespace_of_host() -> bool:
    namespace = os.readlink("/proc/self/ns/mnt")
    if namespace == _INITIAL_MOUNT_NAMESPACE or not host_is_visible():
        return namespace == _INITIAL_MOUNT_NAMESPACE
    return has_mounts_of(1, _HIDDEN)


def has_mounts_of(pid: int, absent: Collection[int] = hidden.ENDED) -> bool:
    """Whether a process has the mount namespace of this one; False for the errnos `absent`. Raises `NotSeen`."""
    link = f"/proc/{pid}/ns/mnt"
    theirs = answers.ask(link, lambda: os.readlink(link), absent=absent, needs="CAP_SYS_PTRACE")
    return answers.seen(theirs) == os.readlink("/proc/self/ns/mnt")


def _groups_of_host() -> frozenset[int]:
    """The peer groups of process 1 of the host; empty if the kernel hides it."""
    if not host_is_visible():
        return frozenset()
    path = "/proc/1/mountinfo"
    text = answers.seen(answers.ask(path, lambda: syscalls.read_whole(path), absent=_HIDDEN))
    mounts = mountinfo.parse(text or b"")
    return frozenset(mount.peer_group for mount in mounts if mount.peer_group)
