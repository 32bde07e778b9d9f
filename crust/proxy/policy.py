"""Decides whether a publish is deferred. The first of these that has a value decides:

1. The CO's own flag, NodePublishVolumeRequest.defer_fs_ops (CSI PR #526).
2. The volume context, which comes from the StorageClass: `crust.dev/defer` = always | never | runtime-class. It may
   also name the handler: `crust.dev/runtime-handler`.
3. The driver's default in the settings, with the same values; never, if there is none.

runtime-class asks for the handler of the pod's RuntimeClass. If the settings name that handler as one of a microVM
runtime, the publish is deferred, to the handler of that name; otherwise it is an ordinary host mount. A pod's answer
cannot change, but it may not be known: then the publish is refused, and the CO retries.

There is no fallback: if the decision is to defer, the publish is deferred or it fails. A repeated publish of a volume
that is deferred at the target does not ask for the pod again; if it decides otherwise, it is refused. A raw block
volume has no filesystem to defer: it passes through, except that the CO's flag for it is an error.

A wrapped driver must stage a volume as block if a publish of it may be deferred. The pod is not known then, so the
proxy says with NodeStageVolume whether that may be, by 2. and 3. (`Policy.may_defer`); nobody else has a default.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from crust.core import deferral_keys, errors
from crust.core.deferral_keys import DEFER, Defer
from crust.kubernetes_api.pod_runtimes import PodName, PodRuntimes


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to defer, to which handler (None: the only registered one), and the source of the decision."""

    defer: bool
    handler: str | None
    decider: str
    takes_sub_path: bool = False
    """Whether the pod is known to take a subPath of the volume."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Decides for one driver.

    `default` is the driver's, `runtimes` is None without access to the Kubernetes API, and `deferring` are the
    handlers of microVM runtimes.
    """

    default: Defer | None = None
    runtimes: PodRuntimes | None = None
    deferring: frozenset[str] = frozenset()

    def may_defer(self, context: Mapping[str, str]) -> bool:
        """Whether a publish of the volume may be deferred without the CO's flag. Asks nobody, and raises nothing."""
        default = self.default or Defer.NEVER
        return deferral_keys.may_defer({DEFER: default.value, **context})

    def always_defers(self, context: Mapping[str, str]) -> bool:
        """Whether each publish of the volume is deferred. Asks nobody, and raises nothing."""
        return context.get(DEFER, self.default and self.default.value) == Defer.ALWAYS.value

    async def decide(
        self, *, flag: bool, block: bool, context: Mapping[str, str], known: str | None = None
    ) -> Decision:
        """Decide for one publish; `known` is the handler that this target of the volume is published to already.

        Raises `deferral_keys.InvalidDeferKey`, `CannotDeferRawBlock`, `HandlersContradict`, `RuntimeClassNotAsked`,
        `PodInfoMissing`, and the errors of `PodRuntimes.handler_of`.
        """
        handler_name = context.get(deferral_keys.RUNTIME_HANDLER) or None
        if flag:
            if block:
                raise deferral_keys.raw_block_volume()
            return Decision(defer=True, handler=handler_name, decider="the CO's flag defer_fs_ops")
        defer = deferral_keys.defer(context)
        decider = f"the volume context, {deferral_keys.DEFER}={defer.value}" if defer else ""
        if defer is None and self.default is not None:
            defer = self.default
            decider = f"the driver's default in the settings, defer={defer.value}"
        if block or defer in (None, Defer.NEVER):
            decider = decider or "nothing asks for deferral"
            if handler_name is not None:  # only a CO with the flag can have meant that
                decider += f", so {deferral_keys.RUNTIME_HANDLER}={handler_name} has no effect"
            return Decision(defer=False, handler=handler_name, decider=decider)
        if defer is Defer.ALWAYS:
            return Decision(defer=True, handler=handler_name, decider=decider)
        if known is not None:
            return Decision(
                defer=True, handler=known, decider="the pod's RuntimeClass, at the first publish"
            )
        return await self._by_runtime_class(context, handler_name, decider)

    async def _by_runtime_class(
        self, context: Mapping[str, str], handler_name: str | None, decider: str
    ) -> Decision:
        if self.runtimes is None:
            raise errors.NotReady.named(
                "RuntimeClassNotAsked",
                "whether to defer the mount cannot be decided",
                why=f"{decider}, and this proxy does not ask the Kubernetes API",
            )
        pod = PodName.of(context)
        handler = await self.runtimes.handler_of(pod)
        decider = f"{decider}; the RuntimeClass of pod {pod} has the handler {handler or '(none)'}"
        if handler not in self.deferring:
            return Decision(defer=False, handler=handler_name, decider=decider)
        if handler_name is not None and handler_name != handler:
            raise errors.InvalidRequest.named(
                "HandlersContradict",
                "whether to defer the mount cannot be decided",
                why=f"{deferral_keys.RUNTIME_HANDLER} is {handler_name!r}, "
                f"and the pod's RuntimeClass has handler {handler!r}",
            )
        return Decision(defer=True, handler=handler, decider=decider)
