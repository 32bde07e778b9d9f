"""The pod of a publish, as a kubelet names it. Needs no client of the Kubernetes API."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from crust.core import errors

_POD_INFO = "csi.storage.k8s.io/pod."


@dataclass(frozen=True, slots=True)
class PodName:
    """A pod, as a kubelet names it in a publish (CSIDriver.spec.podInfoOnMount)."""

    namespace: str
    name: str
    uid: str

    @classmethod
    def of(cls, context: Mapping[str, str]) -> Self:
        """From a volume context. Raises `PodInfoMissing`."""
        found = [context.get(f"{_POD_INFO}{key}", "") for key in ("namespace", "name", "uid")]
        if not all(found):
            raise errors.NotReady.named(
                "PodInfoMissing",
                "whether to defer the mount cannot be decided",
                why="the pod's RuntimeClass decides, and the publish does not name the pod",
                hint="set podInfoOnMount: true in the CSIDriver object",
            )
        return cls(*found)

    @classmethod
    def shown(cls, context: Mapping[str, str]) -> str:
        """`namespace/name` from a volume context; empty where the CO names no pod."""
        found = [context.get(f"{_POD_INFO}{key}", "") for key in ("namespace", "name")]
        return "/".join(found) if all(found) else ""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"
