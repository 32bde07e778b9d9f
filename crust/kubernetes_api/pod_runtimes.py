"""The container runtime handler of a pod, by its RuntimeClass in the Kubernetes API.

A pod's runtimeClassName and a RuntimeClass's handler are immutable, so an answer about a pod's UID stays true while
the pod lives. Therefore pods are kept by UID; classes are followed by name, because a class can be deleted and made
again. A watch of the node's pods fetches them ahead of the publishes, so that a known pod can start while the API
server is away; a publish for an unknown pod asks the server directly. An object of the same name with another UID is
another pod.
"""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Self

from crust.core import errors
from crust.core.deferral_keys import POD_INFO
from crust.core.supervised import Health
from crust.kubernetes_api.api import Informer, KubernetesApi, following
from crust.kubernetes_api.objects import Pod, RuntimeClass


@dataclass(frozen=True, slots=True)
class PodName:
    """A pod, as a kubelet names it in a publish (CSIDriver.spec.podInfoOnMount)."""

    namespace: str
    name: str
    uid: str

    @classmethod
    def of(cls, context: Mapping[str, str]) -> Self:
        """From a volume context. Raises `PodInfoMissing`."""
        parts = [context.get(f"{POD_INFO}{key}", "") for key in ("namespace", "name", "uid")]
        if not all(parts):
            raise errors.NotReady.named(
                "PodInfoMissing",
                "whether to defer the mount cannot be decided",
                why="the pod's RuntimeClass decides, and the publish does not name the pod",
            )
        return cls(*parts)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class PodRuntimes:
    """The runtime handlers of pods. Constructed with a client and the node's name."""

    def __init__(self, api: KubernetesApi, node_name: str) -> None:
        self._api = api
        # "0": from the server's cache, which may be old; a pod that it lacks is asked for by name
        query = {"fieldSelector": f"spec.nodeName={node_name}", "resourceVersion": "0"}
        self._pods: Informer[Pod, tuple[str, bool]] = Informer(
            api, Pod, _kept, key=lambda pod: pod.metadata.uid, query=query
        )
        self._handlers: Informer[RuntimeClass, str] = Informer(
            api, RuntimeClass, lambda runtime_class: runtime_class.handler
        )

    async def handler_of(self, pod: PodName) -> str:
        """The handler of the pod's RuntimeClass; empty for a pod without one.

        Raises `KubernetesApiUnavailable`, `PodUnknown`, `RuntimeClassMissing`.
        """
        known = self._pods.known.get(pod.uid)
        if known is None:
            current = await self._api.get(Pod, pod.name, namespace=pod.namespace)
            if current is None or current.metadata.uid != pod.uid:
                raise errors.PeerUnavailable.named(
                    "PodUnknown",
                    f"the RuntimeClass of pod {pod} is not known",
                    why=f"the API server has no pod of that name with the UID {pod.uid}",
                )
            known = self._pods.known[pod.uid] = _kept(current)
        class_name = known[0]
        if not class_name:
            return ""
        handler = self._handlers.known.get(class_name)
        if handler is None:
            runtime_class = await self._api.get(RuntimeClass, class_name)
            if runtime_class is None:
                raise errors.NotReady.named(
                    "RuntimeClassMissing",
                    f"whether to defer the mount for pod {pod} cannot be decided",
                    why=f"its RuntimeClass {class_name!r} does not exist",
                )
            handler = self._handlers.known[class_name] = runtime_class.handler
        return handler

    def takes_sub_paths(self, uid: str) -> bool:
        """Whether a known pod takes a subPath of each of its CSI volumes. Asks nobody."""
        return self._pods.known.get(uid, ("", False))[1]

    def following(self, health: Health) -> AbstractAsyncContextManager[None]:
        """Keep the pods of the node and the classes known while the block runs."""
        return following(health, self._handlers, self._pods)


def _kept(pod: Pod) -> tuple[str, bool]:
    """The name of its RuntimeClass, and whether it takes subPaths."""
    return pod.spec.runtime_class_name, pod.spec.takes_sub_paths
