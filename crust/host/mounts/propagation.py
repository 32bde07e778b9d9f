"""Whether what this process mounts below a directory is seen by the host, and so by the CO and the runtimes.

A mount that does not propagate is no error for mount(2): a guard would be mounted into nowhere, and the host's
directory would be open. So daemons look before they serve (mount_namespaces(7)):

- a mount with `master:` is a slave: nothing that is mounted here reaches the host. It is what a systemd unit with
  PrivateTmp= or ProtectSystem= gets, a pod with HostToContainer, and `ctr` with an `rshared` bind alone;
- a mount with neither `shared:` nor `master:` is private: only its own mount namespace sees what is mounted on it;
- a mount with `shared:` alone is the host's own group, if the host's process 1 (where it can be seen) has it too.

In the host's own mount namespace propagation does not matter: it is the initial one, or that of process 1 of the
initial PID namespace.
"""

import os
from collections.abc import Iterable

from crust.core import errors
from crust.host.mounts import mountinfo

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO of linux/proc_ns.h."""

_INITIAL_MOUNT_NAMESPACE = "mnt:[4026531832]"
"""MNT_NS_INIT_INO: from Linux 6.18 on. Older kernels gave it any number, which only a look at process 1 tells."""

_BELOW = ("", "pods", "plugins")
"""Of a kubelet's root: where volumes are published and staged, each of which may be a mount of its own."""


def check_seen(path: str) -> None:
    """Raise `MountsNotSeen` unless what the host mounts below `path` is seen here. Blocks."""
    if in_namespace_of_host():
        return
    mount = _mount_of(path)
    if not (mount.peer_group or mount.master):
        raise errors.NotReady.named(
            "MountsNotSeen",
            f"mounts that a driver makes below {path} would not be seen here",
            why=f"the mount at {mount.target} is private to this mount namespace (neither shared: nor master:)",
            hint="in a pod: mount the kubelet's root directory with mountPropagation Bidirectional or "
            "HostToContainer. In a systemd unit: no PrivateMounts=. If the driver lives in this mount namespace: "
            "check_propagation = false. If no driver is to be wrapped: wrap = false",
        )


def check(roots: Iterable[str]) -> None:
    """Raise `MountsNotPropagated` unless mounts below each of `roots` reach the host. Blocks."""
    if in_namespace_of_host():
        return
    for root in roots:
        for name in _BELOW:
            path = os.path.join(root, name).rstrip("/") or "/"
            if not name or os.path.isdir(path):
                _check_path(path)


def _check_path(path: str) -> None:
    mount = _mount_of(path)
    if mount.master:
        why = "is a slave of the host's (master: in mountinfo)"
    elif not mount.peer_group:
        why = "is private to this mount namespace (not shared:)"
    elif (groups := _groups_of_host()) and mount.peer_group not in groups:
        why = "is shared with nobody on the host"
    else:
        return
    raise errors.NotReady.named(
        "MountsNotPropagated",
        f"mounts below {path} would not reach the host",
        why=f"the mount at {mount.target} {why}",
        hint="in a pod: mountPropagation Bidirectional (with ctr: rshared and --rootfs-propagation rshared). In a "
        "systemd unit: no PrivateTmp=, ProtectSystem= or the like, which give it a mount namespace. If CO and "
        "runtimes live in this mount namespace: check_propagation = false",
    )


def _mount_of(path: str) -> mountinfo.Mount:
    """The mount that a directory lies on, or its nearest parent that exists."""
    mount = mountinfo.holding(os.path.realpath(path))
    assert mount is not None, "every path lies on a mount"
    return mount


def host_is_visible() -> bool:
    return os.readlink("/proc/self/ns/pid") == _INITIAL_PID_NAMESPACE


def in_namespace_of_host() -> bool:
    own = os.readlink("/proc/self/ns/mnt")
    if own == _INITIAL_MOUNT_NAMESPACE:
        return True
    try:
        return host_is_visible() and os.readlink("/proc/1/ns/mnt") == own
    except OSError:  # it may be forbidden to look at process 1: then the mounts themselves decide
        return False


def _groups_of_host() -> frozenset[int]:
    """The peer groups of process 1 of the host; empty if it cannot be seen from here."""
    try:
        if not host_is_visible():
            return frozenset()
        with open("/proc/1/mountinfo", "rb") as file:
            mounts = mountinfo.parse(file.read())
    except OSError:
        return frozenset()
    return frozenset(mount.peer_group for mount in mounts if mount.peer_group)
