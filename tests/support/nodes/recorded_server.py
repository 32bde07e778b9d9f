"""Objects as Kubernetes' own Go types write them (tests/data/kubernetes), and a server that answers with them.

Go writes an empty list as null or leaves it out, and so the real API server does: a reader takes both as empty.
"""

import json
from pathlib import Path
from typing import Any

import httpx2

from crust.kubernetes_api import objects
from crust.kubernetes_api.api import KubernetesApi
from crust.kubernetes_api.objects import KubernetesObject
from tests.support.nodes.fake_kubernetes import recorded

DRIVER, UID = "block.csi.crust.dev", "8f3c0a2e-0000-4000-8000-000000000001"
DATA = Path(__file__).parents[2] / "data" / "kubernetes"

KINDS: dict[str, type[KubernetesObject]] = {
    kind.__name__: kind
    for kind in (
        objects.CSIDriver,
        objects.CSINode,
        objects.Node,
        objects.PersistentVolume,
        objects.Pod,
        objects.RuntimeClass,
        objects.VolumeAttachment,
    )
}

FILES = sorted(path.stem for path in DATA.glob("*.json"))
OBJECTS = [name for name in FILES if recorded(name).get("kind") in KINDS]
LISTS = [name for name in FILES if recorded(name).get("kind", "").endswith("List")]


class Server:
    """Answers each request with what the test put there, through the client that crust uses."""

    def __init__(self) -> None:
        self.code = 200
        self.body = b"{}"
        self.asked: list[str] = []
        transport = httpx2.MockTransport(self._answer)
        self.api = KubernetesApi(httpx2.AsyncClient(transport=transport, base_url="http://it"))

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        self.asked.append(str(request.url.raw_path.decode()))
        return httpx2.Response(self.code, content=self.body)

    def say(self, *answers: Any, code: int = 200) -> None:
        """The next answer; several are the lines of a watch."""
        self.code = code
        self.body = b"".join(json.dumps(answer).encode() + b"\n" for answer in answers)


def kind_of(name: str) -> type[KubernetesObject]:
    """The kind of a recorded object or list."""
    return KINDS[recorded(name)["kind"].removesuffix("List")]


async def watched(server: Server, kind: type[KubernetesObject]) -> list[KubernetesObject]:
    """The objects of a watch, until it ends."""
    return [watched_object async for watched_object, _ in server.api.watch(kind, "1")]
