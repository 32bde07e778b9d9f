"""The pod of a publish, as a kubelet names it. Needs no client of the Kubernetes API."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from crust.core import errors

POD_INFO = "csi.storage.k8s.io/pod."
"""What the keys of a volume context that name the pod begin with."""


@dataclass(frozen=True, slots=True)
class PodName:
    """A pod, as a kubelet names it in a publish (CSIDriver.spec.podInfoOnMount)."""

    namespace: str
    name: str
    uid: str

    @classmethod
    def of(cls, context: Mapping[str, str]) -> Self:
        """From a volume context. Raises `PodInfoMissing`."""
        found = [context.get(f"{POD_INFO}{key}", "") for key in ("namespace", "name", "uid")]
        if not all(found):
            raise errors.NotReady.named(
                "PodInfoMissing",
                "whether to defer the mount cannot be decided",
                why="the pod's RuntimeClass decides, and the publish does not name the pod",
                hint="set podInfoOnMount: true in the CSIDriver object",
            )
        return cls(*found)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"
