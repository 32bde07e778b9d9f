"""Whether a deferred publish may be: before the driver is called, by the request, and again by the driver's answer.

A deferred publish that the handler cannot serve is an error that says why; it never becomes a host mount.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import replace

from crust.core import deferral_keys, errors, volumes
from crust.handoff.record import needs, unsupported
from crust.proxy.handlers import Feature, Handler
from crust.proxy.target import Target, Wanted
from crust.rpc.messages import csi
from crust.wire.csi.v1 import csi_pb2


class DeferredMountMismatch(errors.RuntimeFailed):
    """The driver's deferred_mount differs from the request."""

    def __init__(self, field: str, asked: object, answered: object) -> None:
        super().__init__(
            "the driver's deferred_mount differs from the request",
            why=f"{field} is {answered}, and {asked} was requested",
            hint="this is a bug in the driver or the shim in front of it",
        )
        self.field = field


def check(
    handler: Handler,
    *,
    fs_type: str,
    group: volumes.GroupChange | None,
    readonly: bool,
    mount: volumes.DeferredMount | None = None,
) -> None:
    """Raise `UnsupportedByHandler` for the first missing feature. An empty `fs_type` is not known yet.

    `mount`: the driver's answer. What only a guest can open, only a guest can format; the proxy formats the rest.
    """
    if fs_type and fs_type not in handler.filesystems:
        known = ", ".join(sorted(handler.filesystems)) or "none"
        raise unsupported(
            handler.name, f"its filesystem is {fs_type!r}, and the runtime supports: {known}"
        )
    is_opened_here = mount is not None and mount.encryption is None and mount.image is None
    for feature, what in needs(readonly=readonly, group=group, mount=mount):
        if feature not in handler.features and not (feature is Feature.FORMAT and is_opened_here):
            raise unsupported(handler.name, what, feature)


def check_limits(handler: Handler, limits: volumes.IoLimits) -> None:
    """Raise `UnsupportedByHandler` if there are limits and the handler cannot enforce them: nobody else could."""
    if limits != volumes.IoLimits() and Feature.IO_LIMITS not in handler.features:
        raise unsupported(handler.name, "it has I/O limits", Feature.IO_LIMITS)


def mount_of(
    wanted: Wanted,
    request: csi_pb2.NodePublishVolumeRequest,
    response: csi_pb2.NodePublishVolumeResponse,
) -> volumes.DeferredMount:
    """What the driver answered, with what the CO asked for; raises if the answer drops or changes something."""
    if not response.HasField("deferred_mount"):
        raise errors.RuntimeFailed.named(
            "DriverIgnoredDeferral",
            f"volume {wanted.key} was not deferred",
            why="the driver answered without deferred_mount",
            hint="put a crust shim between the proxy and the driver; if there is one, this is a bug in the driver",
        )
    answer = csi.deferred_mount(response.deferred_mount)
    access = wanted.access
    if access.fs_type and access.fs_type != answer.fs_type:
        raise DeferredMountMismatch("fs_type", repr(access.fs_type), repr(answer.fs_type))
    if access.group is not None and access.group != answer.group:
        raise DeferredMountMismatch("the group", _text(access.group), _text(answer.group))
    asked = deferral_keys.encryption(request.volume_context)
    if asked is not None and answer.encryption is not asked:
        raise errors.RuntimeFailed.named(
            "DriverIgnoredEncryption",
            f"volume {wanted.key} was not deferred",
            why=f"{deferral_keys.ENCRYPTION} is {asked.value}, and the driver answered without encryption: the guest "
            "would write it unencrypted",
            hint="update the driver, or the crust shim in front of it",
        )
    return replace(
        answer,
        readonly=answer.readonly or wanted.readonly,
        # asked for, and perhaps not repeated by the driver: they must reach the runtime (KEP-2857)
        mount_options=(*answer.mount_options, *wanted.options),
    )


def _text(group: volumes.GroupChange | None) -> str:
    return f"{group.gid} ({group.policy.value})" if group is not None else "none"


_POD = re.compile(r"(.*/pods/[^/]+/)")


def check_place(handler: Handler, target: volumes.TargetPath, rows: Iterable[Target]) -> None:
    """Raise TooManyVolumesInSandbox if the pod of the target has as many volumes as its sandbox can have, and
    PathTooLongForHandler if the runtime cannot be given a volume at such a path.

    Those that are being published are among the rows: a kubelet publishes all volumes of a pod at once. The pod is
    known by the kubelet's path of a target; where a CO has other paths, the handler itself refuses what is too much,
    when the container starts.
    """
    length = len(os.fsencode(target.text))
    if 0 < handler.max_target_path_bytes < length:
        raise errors.NotReady.named(
            "PathTooLongForHandler",
            f"the volume cannot be published to runtime handler {handler.name!r} at {target}",
            why=f"the path has {length} bytes, and its runtime takes {handler.max_target_path_bytes}",
            hint="use a shorter name for the volume, or a kubelet's root with a shorter path",
        )
    pod, most = _POD.match(target.text), handler.max_volumes_per_sandbox
    if not most or pod is None:
        return
    others = sum(
        row.handler == handler.name and row.path != target.text and row.path.startswith(pod[1])
        for row in rows
    )
    if others >= most:
        raise errors.NotReady.named(
            "TooManyVolumesInSandbox",
            f"the volume cannot be published to runtime handler {handler.name!r} at {target}",
            why=f"its sandboxes have at most {most} volumes, and the pod has as many already",
            hint="use fewer volumes in the pod, do not defer some of them, or raise the handler's limit",
        )
