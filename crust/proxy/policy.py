"""Decides whether a publish is deferred. The first of these that is set decides:

1. The CO's own flag, NodePublishVolumeRequest.defer_fs_ops (CSI PR #526).
2. The volume context, which comes from the StorageClass: `crust.dev/defer` = always | never | runtime-class. It may
   also name the handler: `crust.dev/runtime-handler`.

If neither is set, the publish is an ordinary host mount. There is no fallback: a publish that is to be deferred is
deferred, or it fails. A raw block volume has no filesystem to defer: it passes through, except that the CO's flag for
it is an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from crust import deferral_keys, errors, volumes
from crust.deferral_keys import Defer


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to defer, to which handler (None: the only one that is registered), and what decided it."""

    defer: bool
    handler: volumes.HandlerName | None
    decider: str


class CannotDeferRawBlock(errors.InvalidRequest):
    """defer_fs_ops is set for a raw block volume, which has no filesystem to defer."""

    def __init__(self) -> None:
        super().__init__(
            "defer_fs_ops cannot be honoured",
            why="the volume is published as a raw block device, which has no filesystem to mount",
            hint="publish it without defer_fs_ops: a microVM runtime attaches the device itself",
        )


class RuntimeClassUnknown(errors.NotReady):
    """The pod's RuntimeClass decides, and this proxy does not know it."""

    def __init__(self) -> None:
        super().__init__(
            "whether to defer the mount cannot be decided",
            why=f"{deferral_keys.DEFER} is runtime-class, and this proxy does not ask the Kubernetes API",
            hint="set crust.dev/defer to always or never in the StorageClass",
        )


class AlreadyDeferred(errors.Conflict):
    """A host mount is requested for a target that is published deferred."""

    def __init__(self, target: str) -> None:
        super().__init__(
            f"the volume cannot be mounted at {target}",
            why="it is published there already, to a runtime",
            hint="unpublish it first; a publish never switches from one to the other",
        )


def decide(*, flag: bool, block: bool, context: Mapping[str, str]) -> Decision:
    """Decide for one publish.

    Raises `deferral_keys.InvalidDeferKey`, `CannotDeferRawBlock`, `RuntimeClassUnknown`.
    """
    handler = context.get(deferral_keys.RUNTIME_HANDLER)
    named = volumes.HandlerName(handler) if handler else None
    if flag:
        if block:
            raise CannotDeferRawBlock()
        return Decision(defer=True, handler=named, decider="the CO's flag defer_fs_ops")
    wanted = deferral_keys.defer(context)
    if wanted is None:
        return Decision(defer=False, handler=None, decider="default")
    if wanted is Defer.RUNTIME_CLASS:
        raise RuntimeClassUnknown()
    return Decision(
        defer=wanted is Defer.ALWAYS and not block,
        handler=named,
        decider=f"the volume context, {deferral_keys.DEFER}={wanted.value}",
    )
