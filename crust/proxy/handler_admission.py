"""Checks whether a handler supports what a publish needs: before the driver is called, and again with its answer.

A deferred publish that the handler cannot serve is an error that says why; it never becomes a host mount.
"""

import os
import re
from collections.abc import Iterable

from crust.core import errors, volumes
from crust.proxy.handlers import Feature, Handler
from crust.proxy.target import Target


class UnsupportedByHandler(errors.NotReady):
    """The runtime handler does not support what the volume needs."""

    def __init__(self, handler: str, why: str, hint: str) -> None:
        super().__init__(
            f"the volume cannot be published to runtime handler {handler!r}",
            why=f"it {why}",
            hint=hint,
        )


class DeferredMountMismatch(errors.RuntimeFailed):
    """The driver's deferred_mount differs from the request."""

    def __init__(self, field: str, asked: object, answered: object) -> None:
        super().__init__(
            "the driver's deferred_mount differs from the request",
            why=f"{field} is {answered}, and {asked} was requested",
            hint="this is a bug in the driver or the shim in front of it",
        )
        self.field = field


def check_answer(asked: volumes.MountAccess, answer: volumes.DeferredMount) -> None:
    """Raise `DeferredMountMismatch` if the answer drops or changes a requested filesystem or group."""
    if asked.fs_type and asked.fs_type != answer.fs_type:
        raise DeferredMountMismatch("fs_type", repr(asked.fs_type), repr(answer.fs_type))
    if asked.group is not None and asked.group != answer.group:
        raise DeferredMountMismatch("the group", _text(asked.group), _text(answer.group))


def _text(group: volumes.GroupChange | None) -> str:
    return f"{group.gid} ({group.policy.value})" if group is not None else "none"


def check(
    handler: Handler, *, fs_type: str, group: volumes.GroupChange | None, readonly: bool
) -> None:
    """Raise `UnsupportedByHandler` for the first missing feature. An empty `fs_type` is not known yet."""
    if fs_type and fs_type not in handler.filesystems:
        known = ", ".join(sorted(handler.filesystems)) or "none"
        raise UnsupportedByHandler(
            handler.name,
            f"does not support the filesystem {fs_type!r}; it supports: {known}",
            "choose another csi.storage.k8s.io/fstype, or do not defer this volume",
        )
    if readonly and Feature.READ_ONLY not in handler.features:
        raise UnsupportedByHandler(
            handler.name, "cannot attach a volume read-only", "do not defer this volume"
        )
    if group is None or readonly:
        return
    if Feature.GROUP not in handler.features:
        raise UnsupportedByHandler(
            handler.name,
            f"cannot change the group of files, and fsGroup {group.gid} is requested",
            "remove fsGroup, or do not defer this volume",
        )


def check_limits(handler: Handler, limits: volumes.IoLimits) -> None:
    """Raise `UnsupportedByHandler` if there are limits and the handler cannot enforce them: nobody else could."""
    if limits != volumes.IoLimits() and Feature.IO_LIMITS not in handler.features:
        raise UnsupportedByHandler(
            handler.name,
            "cannot enforce I/O limits, and the volume has some",
            "remove the volume's limits, use a handler that offers IO_LIMITS, or do not defer it",
        )


def check_mount(handler: Handler, mount: volumes.DeferredMount) -> None:
    """`check` and `check_limits`, and raise `UnsupportedByHandler` for work in the guest that the handler cannot do
    and the proxy neither: to open or decrypt the volume, and to format what is opened there.
    """
    check(handler, fs_type=mount.fs_type, group=mount.group, readonly=mount.readonly)
    check_limits(handler, mount.io_limits)
    if mount.image is not None and Feature.NETWORK_IMAGE not in handler.features:
        raise UnsupportedByHandler(
            handler.name,
            f"cannot open an image on the network, and the volume is the image {mount.image}",
            "use a handler that offers NETWORK_IMAGE: `crust handlers` lists them",
        )
    if mount.encryption is not None and Feature.LUKS not in handler.features:
        raise UnsupportedByHandler(
            handler.name,
            "cannot open LUKS containers, and the volume is encrypted",
            "use a handler that offers LUKS: `crust handlers` lists them",
        )
    only_in_guest = mount.encryption is not None or mount.image is not None
    can_format = mount.format is None or mount.readonly or Feature.FORMAT in handler.features
    if only_in_guest and not can_format:
        raise UnsupportedByHandler(
            handler.name,
            "cannot make filesystems, and only a guest can make the one of this volume, which was created empty",
            "use a handler that offers FORMAT, or do not defer this volume",
        )


_POD = re.compile(r"(.*/pods/[^/]+/)")


def check_place(handler: Handler, target: volumes.TargetPath, rows: Iterable[Target]) -> None:
    """Raise TooManyVolumesInSandbox if the pod of the target has as many volumes as its sandbox can have, and
    PathTooLongForHandler if the runtime cannot be given a volume at such a path.

    Those that are being published are among the rows: a kubelet publishes all volumes of a pod at once. The pod is
    known by the kubelet's path of a target; where a CO has other paths, the handler itself refuses what is too much,
    when the container starts.
    """
    length = len(os.fsencode(target.text))
    if 0 < handler.max_path_bytes < length:
        raise errors.NotReady.named(
            "PathTooLongForHandler",
            f"the volume cannot be published to runtime handler {handler.name!r} at {target}",
            why=f"the path has {length} bytes, and its runtime takes {handler.max_path_bytes}",
            hint="use a shorter name for the volume, or a kubelet's root with a shorter path",
        )
    pod = _POD.match(target.text)
    if not handler.max_volumes or pod is None:
        return
    others = sum(
        row.handler == handler.name and row.path != target.text and row.path.startswith(pod[1])
        for row in rows
    )
    if others >= handler.max_volumes:
        raise errors.NotReady.named(
            "TooManyVolumesInSandbox",
            f"the volume cannot be published to runtime handler {handler.name!r} at {target}",
            why=f"its sandboxes have at most {handler.max_volumes} volumes, and the pod has as many already",
            hint="use fewer volumes in the pod, do not defer some of them, or raise the handler's limit",
        )
