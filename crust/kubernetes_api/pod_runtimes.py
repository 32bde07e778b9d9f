"""Which container runtime handler a pod has: by its RuntimeClass, as the Kubernetes API has it.

A pod's runtimeClassName and a RuntimeClass's handler are immutable, so an answer about a pod's UID is true for as
long as the pod lives, however old it is. Therefore answers are kept by UID; classes are read again with each list,
because one can be deleted and made again. A watch of the node's pods fetches them
ahead of the publishes, so that a pod that was seen can start while the API server is away; a publish for a pod that
the watch has not brought asks directly. An object of the same name with another UID is another pod.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import lightkube
from lightkube.resources.core_v1 import Pod
from lightkube.resources.node_v1 import RuntimeClass

from crust import errors
from crust.kubernetes_api.api import asking, reason
from crust.kubernetes_api.pod_name import PodName

_log = logging.getLogger(__name__)

_RELIST_S = 600.0
"""A watch that lost events without an error is repaired by the next list."""
_PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0)
_GONE = 410


class PodUnknown(errors.PeerUnavailable):
    """The API server does not know the pod, or knows an earlier one of its name."""

    def __init__(self, pod: PodName) -> None:
        super().__init__(
            f"the RuntimeClass of pod {pod} is not known",
            why=f"the API server has no pod of that name with the UID {pod.uid}",
            hint="the caller will retry: an API server that lags behind learns of the pod within seconds",
        )


class RuntimeClassMissing(errors.NotReady):
    """A pod names a RuntimeClass that does not exist."""

    def __init__(self, pod: PodName, name: str) -> None:
        super().__init__(
            f"whether to defer the mount for pod {pod} cannot be decided",
            why=f"its RuntimeClass {name!r} does not exist",
            hint="create the RuntimeClass, or correct the pod's runtimeClassName",
        )


class PodRuntimes:
    """The runtime handlers of pods. Constructed with a client and the node's name."""

    def __init__(self, client: lightkube.AsyncClient, node_name: str) -> None:
        self._client = client
        self._node_name = node_name
        self._classes: dict[str, str] = {}
        self._handlers: dict[str, str] = {}

    async def handler_of(self, pod: PodName) -> str:
        """The handler of the pod's RuntimeClass; empty for a pod without one.

        Raises `KubernetesApiUnavailable`, `PodUnknown`, `RuntimeClassMissing`.
        """
        class_name = self._classes.get(pod.uid)
        if class_name is None:
            class_name = await self._ask_class(pod)
            self._classes[pod.uid] = class_name
        if not class_name:
            return ""
        if class_name not in self._handlers:
            self._handlers[class_name] = await self._ask_handler(pod, class_name)
        return self._handlers[class_name]

    async def _ask_class(self, pod: PodName) -> str:
        async with asking(f"pod {pod}"):
            try:
                found = await self._client.get(Pod, pod.name, namespace=pod.namespace)
            except lightkube.ApiError as error:
                if error.status.code == 404:
                    raise PodUnknown(pod) from error
                raise
        if found.metadata is None or found.metadata.uid != pod.uid:
            raise PodUnknown(pod)
        return _class_of(found)

    async def _ask_handler(self, pod: PodName, name: str) -> str:
        async with asking(f"RuntimeClass {name}"):
            try:
                found = await self._client.get(RuntimeClass, name)
            except lightkube.ApiError as error:
                if error.status.code == 404:
                    raise RuntimeClassMissing(pod, name) from error
                raise
        return str(found.handler)

    async def follow(self) -> None:
        """Keep the pods of the node known, until cancelled. Outages are logged and waited for."""
        failures = 0
        while True:
            try:
                async with asyncio.timeout(_RELIST_S):
                    version = await self._list()
                    failures = 0
                    await self._watch(version)
            except TimeoutError:
                continue
            except httpx2.HTTPError as error:
                if isinstance(error, lightkube.ApiError) and error.status.code == _GONE:
                    continue  # the version is too old for the server: list again
                pause_s = _PAUSES_S[min(failures, len(_PAUSES_S) - 1)]
                failures += 1
                extra = {"error": reason(error), "again_in_s": pause_s}
                _log.warning("the pods of this node are not followed", extra=extra)
                await asyncio.sleep(pause_s)

    async def _list(self) -> str:
        pods = self._client.list(Pod, namespace="*", fields={"spec.nodeName": self._node_name})
        listed = {_uid(pod): _class_of(pod) async for pod in pods}
        classes = self._client.list(RuntimeClass)
        handlers = {_name(each): str(each.handler) async for each in classes}
        self._classes, self._handlers = listed, handlers
        return str(pods.resourceVersion)

    async def _watch(self, version: str) -> None:
        changes = self._client.watch(
            Pod,
            namespace="*",
            fields={"spec.nodeName": self._node_name},
            resource_version=version,
        )
        async for event, pod in changes:
            if event == "DELETED":
                self._classes.pop(_uid(pod), None)
            else:
                self._classes[_uid(pod)] = _class_of(pod)


@contextlib.asynccontextmanager
async def following(runtimes: PodRuntimes) -> AsyncIterator[None]:
    """Follow the node's pods while the block runs."""
    task = asyncio.create_task(runtimes.follow(), name="follow pods")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _uid(pod: Any) -> str:
    return str(pod.metadata.uid)


def _class_of(pod: Any) -> str:
    return (pod.spec.runtimeClassName if pod.spec is not None else None) or ""


def _name(found: Any) -> str:
    return str(found.metadata.name)
