"""Whether a handler can do what a publish asks: asked before anything is touched, and again with the driver's answer.

A deferred publish that cannot be honoured is an error that says why; it never becomes a host mount.
"""

from crust import errors, volumes
from crust.proxy.handlers import Feature, Handler


class UnsupportedByHandler(errors.NotReady):
    """The handler cannot do what the volume needs."""

    def __init__(self, handler: str, lacks: str, hint: str) -> None:
        super().__init__(
            f"the volume cannot be given to runtime handler {handler!r}",
            why=f"it {lacks}",
            hint=hint,
        )


class DeferredMountMismatch(errors.RuntimeFailed):
    """The driver's answer is not what was asked for."""

    def __init__(self, field: str, asked: object, told: object) -> None:
        super().__init__(
            "the driver's deferred_mount is not what the publish asks for",
            why=f"{field} is {told}, and {asked} was asked for",
            hint="this is a bug in the driver or the shim in front of it",
        )
        self.field = field


def check_answer(asked: volumes.MountAccess, told: volumes.DeferredMount) -> None:
    """Raise `DeferredMountMismatch` if the answer drops or changes a filesystem or a group that was asked for."""
    if asked.fs_type and asked.fs_type != told.fs_type:
        raise DeferredMountMismatch("fs_type", repr(asked.fs_type), repr(told.fs_type))
    if asked.group is not None and asked.group != told.group:
        raise DeferredMountMismatch("the group", _words(asked.group), _words(told.group))


def _words(group: volumes.GroupChange | None) -> str:
    return f"{group.gid} ({group.policy.value})" if group is not None else "none"


def check(
    handler: Handler, *, fs_type: str, group: volumes.GroupChange | None, readonly: bool
) -> None:
    """Raise `UnsupportedByHandler` for the first thing that is missing. An empty `fs_type` is not known yet."""
    if fs_type and fs_type not in handler.filesystems:
        known = ", ".join(sorted(handler.filesystems)) or "none"
        raise UnsupportedByHandler(
            handler.name,
            f"does not know the filesystem {fs_type!r}; it knows: {known}",
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
            f"cannot give the files a group, and fsGroup {group.gid} is asked for",
            "leave fsGroup out, or do not defer this volume",
        )
    if (
        group.policy is volumes.GroupPolicy.ON_ROOT_MISMATCH
        and Feature.GROUP_CHANGE_POLICY not in handler.features
    ):
        raise UnsupportedByHandler(
            handler.name,
            "knows no fsGroupChangePolicy but Always",
            "use Always, or do not defer this volume",
        )


def check_limits(handler: Handler, limits: volumes.IoLimits) -> None:
    """Raise `UnsupportedByHandler` if there are limits and the handler cannot keep them: nobody else could."""
    if limits != volumes.IoLimits() and Feature.IO_LIMITS not in handler.features:
        raise UnsupportedByHandler(
            handler.name,
            "cannot limit what a guest does to a volume, and the volume has I/O limits",
            "take the volume's limits away, use a handler that offers IO_LIMITS, or do not defer it",
        )
