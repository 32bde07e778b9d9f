"""Decides whether a publish is deferred. The first of these that is set decides:

1. The CO's own flag, NodePublishVolumeRequest.defer_fs_ops (CSI PR #526).
2. The volume context, which comes from the StorageClass: `crust.dev/defer` = always | never. It may also name the
   handler: `crust.dev/runtime-handler`.

If neither is set, the publish is an ordinary host mount. There is no fallback: a publish that is to be deferred is
deferred, or it fails. A raw block volume has no filesystem to defer: it passes through, except that the CO's flag for
it is an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from crust import errors, volumes

DEFER_KEY = "crust.dev/defer"
HANDLER_KEY = "crust.dev/runtime-handler"


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to defer, to which handler (None: the only one that is registered), and what decided it."""

    defer: bool
    handler: volumes.HandlerName | None
    decider: str


class InvalidDeferPolicy(errors.InvalidRequest):
    """crust.dev/defer is neither 'always' nor 'never'."""

    def __init__(self, key: str, value: str) -> None:
        super().__init__(
            f"whether to defer the mount cannot be decided: {key} is {value[:64]!r}",
            why="it must be 'always' or 'never'",
            hint="correct the parameter in the StorageClass and create the volume again",
        )


class CannotDeferRawBlock(errors.InvalidRequest):
    """defer_fs_ops is set for a raw block volume, which has no filesystem to defer."""

    def __init__(self) -> None:
        super().__init__(
            "defer_fs_ops cannot be honoured",
            why="the volume is published as a raw block device, which has no filesystem to mount",
            hint="publish it without defer_fs_ops: a microVM runtime attaches the device itself",
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
    """Decide for one publish; raises `InvalidDeferPolicy` and `CannotDeferRawBlock`."""
    handler = context.get(HANDLER_KEY)
    named = volumes.HandlerName(handler) if handler else None
    if flag:
        if block:
            raise CannotDeferRawBlock()
        return Decision(defer=True, handler=named, decider="the CO's flag defer_fs_ops")
    wish = context.get(DEFER_KEY)
    if wish is None:
        return Decision(defer=False, handler=None, decider="default")
    if wish not in ("always", "never"):
        raise InvalidDeferPolicy(DEFER_KEY, wish)
    return Decision(
        defer=wish == "always" and not block,
        handler=named,
        decider=f"the volume context, {DEFER_KEY}={wish}",
    )
