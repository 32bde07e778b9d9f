"""Who decides that a publish is deferred: the first decider that has an opinion.

1. The CO's own flag, NodePublishVolumeRequest.defer_fs_ops (CSI PR #526).
2. The volume context, which comes from the StorageClass: `crust.dev/defer` = always | never, and
   `crust.dev/runtime-handler` = the handler's name.

No opinion: an ordinary host mount. Nothing falls back: once a publish is to be deferred, it is deferred or it fails.
A raw block volume has no filesystem to defer; it passes as it is unless the CO's flag asks for the impossible.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from crust import errors, volumes

DEFER_KEY = "crust.dev/defer"
HANDLER_KEY = "crust.dev/runtime-handler"


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to defer, to which handler (None: the only one there is), and who said so."""

    defer: bool
    handler: volumes.HandlerName | None
    decider: str


class InvalidDeferPolicy(errors.InvalidRequest):
    """A decider said something that is neither yes nor no."""

    def __init__(self, key: str, value: str) -> None:
        super().__init__(
            f"whether to defer the mount cannot be decided: {key} is {value[:64]!r}",
            why="it must be 'always' or 'never'",
            hint="correct the parameter in the StorageClass and create the volume anew",
        )


class CannotDeferRawBlock(errors.InvalidRequest):
    """defer_fs_ops together with raw block access."""

    def __init__(self) -> None:
        super().__init__(
            "defer_fs_ops cannot be honoured",
            why="the volume is published as a raw block device, which has no filesystem to mount",
            hint="publish it without defer_fs_ops: a microVM runtime attaches the device itself",
        )


class AlreadyDeferred(errors.Conflict):
    """An ordinary publish of a target that is deferred."""

    def __init__(self, target: str) -> None:
        super().__init__(
            f"the volume cannot be mounted at {target}",
            why="it is published there already, handed to a runtime",
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
        return Decision(defer=False, handler=None, decider="no decider had an opinion")
    if wish not in ("always", "never"):
        raise InvalidDeferPolicy(DEFER_KEY, wish)
    return Decision(
        defer=wish == "always" and not block,
        handler=named,
        decider=f"the volume context, {DEFER_KEY}={wish}",
    )
