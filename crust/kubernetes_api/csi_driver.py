"""The CSIDriver object of a driver, as the cluster has it, and whether crust's configuration goes with it.

Kubernetes decides by this object whether a volume is attached before a node has it, and whether a publish names its
pod. Without an object it attaches, and does not name the pod. A mismatch stops nothing: an object can be corrected
while nodes serve (attachRequired only by recreating it). Needs no client of the Kubernetes API.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from crust.core.deferral_keys import Defer

ATTACHES = "crust.dev/attaches"
"""In the manifest of GetPluginInfo: whether the driver's controller publishes to nodes, wherever it runs."""
_OWN_DRIVER = "block.csi.crust.dev"
_WITHOUT_OBJECT = "the cluster has no CSIDriver object of that name, so it takes its defaults"


@dataclass(frozen=True, slots=True)
class CsiDriverObject:
    """What the cluster does for a driver. `exists`: by an object, and not by Kubernetes' defaults."""

    name: str
    exists: bool
    attach_required: bool = True
    pod_info_on_mount: bool = False


@dataclass(frozen=True, slots=True)
class Configuration:
    """What crust runs. `runtime_class`: a pod's RuntimeClass may decide about a volume that says so.

    `default` decides about volumes that say nothing. `attaches`: whether the driver's controller publishes volumes to
    nodes; None: it is not known here, as where the controller runs elsewhere.
    """

    runtime_class: bool
    default: Defer | None
    attaches: bool | None


@dataclass(frozen=True, slots=True)
class Mismatch:
    """What does not go together, what follows, and what to do. `is_fatal`: volumes do not get to their pods."""

    what: str
    why: str
    todo: str
    is_fatal: bool


def mismatches(found: CsiDriverObject, running: Configuration) -> tuple[Mismatch, ...]:
    """What of the object does not go with the configuration."""
    return (*_pod_info(found, running), *_attach(found, running))


def _pod_info(found: CsiDriverObject, running: Configuration) -> Iterator[Mismatch]:
    if found.pod_info_on_mount or not running.runtime_class:
        return
    by_default = running.default is Defer.RUNTIME_CLASS
    which = "every publish" if by_default else "a publish with crust.dev/defer: runtime-class"
    yield Mismatch(
        f"podInfoOnMount of CSIDriver {found.name} is false",
        _shown(found, f"a pod's RuntimeClass decides, and {which} is refused without its name"),
        "set spec.podInfoOnMount: true",
        is_fatal=by_default,
    )


def _attach(found: CsiDriverObject, running: Configuration) -> Iterator[Mismatch]:
    if running.attaches is None or running.attaches == found.attach_required:
        return
    if found.attach_required:
        yield Mismatch(
            f"attachRequired of CSIDriver {found.name} is true",
            _shown(found, "the driver attaches nothing, and pods wait for an external-attacher"),
            "make the object again with spec.attachRequired: false, or run external-attacher",
            is_fatal=False,
        )
    elif found.name != _OWN_DRIVER:  # its volumes need no attach, and are not refused without
        yield Mismatch(
            f"attachRequired of CSIDriver {found.name} is false",
            "the driver's controller attaches volumes, and is never asked to (crust's own needs no attach)",
            "unless it is crust's, make the object again with spec.attachRequired: true, for external-attacher",
            is_fatal=False,
        )


def _shown(found: CsiDriverObject, why: str) -> str:
    return why if found.exists else f"{_WITHOUT_OBJECT}; {why}"
