"""Every reader of the Kubernetes API, with objects as Kubernetes' own Go types write them (tests/data/kubernetes).

Go writes an empty list as null or leaves it out, and so the real API server does: a reader takes both as empty.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from crust.core.supervised import Health
from crust.kubernetes_api import api as kubernetes_api
from crust.kubernetes_api import objects
from crust.kubernetes_api.api import Followed, KubernetesApi
from crust.kubernetes_api.objects import KubernetesObject
from crust.kubernetes_api.pod_runtimes import PodName, PodRuntimes
from crust.kubernetes_api.volumes_in_use import TAINT, OutOfServiceNodes
from tests.support.nodes.fake_kubernetes import FakeKubernetes, recorded

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


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    yield made
    await made.api.close()


def kind_of(name: str) -> type[KubernetesObject]:
    return KINDS[recorded(name)["kind"].removesuffix("List")]


async def watched(server: Server, kind: type[KubernetesObject]) -> list[KubernetesObject]:
    return [watched_object async for watched_object, _ in server.api.watch(kind, "1")]


def test_all_recorded_objects_are_read_by_a_test() -> None:
    others = {"status-forbidden", "status-gone", "watch-bookmark"}
    assert {*OBJECTS, *LISTS, *others} == set(FILES)


@pytest.mark.parametrize("name", OBJECTS)
async def test_recorded_object_is_read_alone_listed_and_watched(server: Server, name: str) -> None:
    kind, written = kind_of(name), recorded(name)
    server.say(written)
    read = await server.api.get(kind, written["metadata"]["name"])
    assert read is not None
    assert read.name == written["metadata"]["name"]
    assert read.metadata.uid == UID
    server.say({"kind": f"{written['kind']}List", "metadata": {}, "items": [written]})
    assert (await server.api.listing(kind))[0] == (read,)
    server.say(recorded("watch-bookmark"), {"type": "ADDED", "object": written})
    assert await watched(server, kind) == [read]


@pytest.mark.parametrize("name", LISTS)
async def test_recorded_list_is_read_with_its_version(server: Server, name: str) -> None:
    written = recorded(name)
    server.say(written)
    objects_of_kind, version = await server.api.listing(kind_of(name))
    assert len(objects_of_kind) == len(written["items"] or [])
    assert version == written["metadata"]["resourceVersion"]


@pytest.mark.parametrize("name", OBJECTS)
async def test_each_field_may_be_null_or_absent(server: Server, name: str) -> None:
    """What a later version of Go's types leaves out, or writes as null, is the zero value."""
    kind, written = kind_of(name), recorded(name)
    for key in ("spec", "status", "handler"):
        for lesser in ({**written, key: None}, {k: v for k, v in written.items() if k != key}):
            server.say(lesser)
            assert await server.api.get(kind, written["metadata"]["name"]) is not None
    for part in ("spec", "status"):
        for key in written.get(part, {}):
            server.say({**written, part: {**written[part], key: None}})
            assert await server.api.get(kind, written["metadata"]["name"]) is not None


async def test_page_of_a_list_is_continued(server: Server) -> None:
    first = {"metadata": {"continue": "here"}, "items": [recorded("csinode-no-driver")]}
    pages = [first, recorded("csinode-list")]
    answers = iter(pages)

    def answer(request: httpx2.Request) -> httpx2.Response:
        server.asked.append(str(request.url))
        return httpx2.Response(200, json=next(answers))

    transport = httpx2.MockTransport(answer)
    async with httpx2.AsyncClient(transport=transport, base_url="http://it") as http:
        listed, _ = await KubernetesApi(http).listing(objects.CSINode)
    assert [node.name for node in listed] == ["cp-1", "cp-1", "worker-1"]
    assert "continue=here" in server.asked[1]


async def test_recorded_refusal_is_shown_in_the_servers_words(server: Server) -> None:
    server.say(recorded("status-forbidden"), code=403)
    asking = (
        server.api.get(objects.Node, "x"),
        server.api.listing(objects.Node),
        watched(server, objects.Node),
    )
    for answer in asking:
        with pytest.raises(kubernetes_api.KubernetesApiUnavailable, match='nodes "x" is forbidden'):
            await answer


@pytest.mark.parametrize("code", [200, 410])
async def test_recorded_expiry_ends_a_watch(server: Server, code: int) -> None:
    """As an event of a watch that runs, and as the answer to one that begins."""
    gone = recorded("status-gone")
    server.say(gone if code == 410 else {"type": "ERROR", "object": gone}, code=code)
    with pytest.raises(kubernetes_api.VersionExpiredError):
        await watched(server, objects.Node)


async def test_only_the_servers_word_on_this_very_name_means_absent(server: Server) -> None:
    """A path that the server does not know, and what a proxy on the way answers, are 404 too."""
    absent = {"kind": "Status", "reason": "NotFound", "code": 404, "message": 'nodes "a" not found'}
    server.say({**absent, "details": {"name": "a", "kind": "nodes"}}, code=404)
    assert await server.api.get(objects.Node, "a") is None
    for other in ({**absent, "details": {}}, {**absent, "details": None}, "404 page not found"):
        server.say(other, code=404)
        with pytest.raises(kubernetes_api.KubernetesApiUnavailable, match="Node a"):
            await server.api.get(objects.Node, "a")


@pytest.mark.parametrize(
    "body", ["", "null and void", "[]", '"text"', '{"spec": []}', '{"spec": {"taints": {}}}']
)
async def test_answer_of_another_form_is_no_answer(server: Server, body: str) -> None:
    server.body = body.encode()
    with pytest.raises(kubernetes_api.KubernetesApiUnavailable, match="another form"):
        await server.api.get(objects.Node, "a")


async def test_answer_that_is_too_large_is_not_kept(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_api, "_ANSWER_BYTES", 1000)
    monkeypatch.setattr(kubernetes_api, "_EVENT_BYTES", 1000)
    server.say(recorded("node-fresh"), {"padding": "x" * 1000})
    with pytest.raises(kubernetes_api.KubernetesApiUnavailable, match="larger than 1000 bytes"):
        await server.api.get(objects.Node, "fresh-1")
    with pytest.raises(kubernetes_api.KubernetesApiUnavailable, match="larger than 1000 bytes"):
        await watched(server, objects.Node)


async def test_name_is_one_part_of_the_path(server: Server) -> None:
    server.say(recorded("pod-plain"))
    await server.api.get(objects.Pod, "../x?y", namespace="a/b")
    assert server.asked == ["/api/v1/namespaces/a%2Fb/pods/..%2Fx%3Fy"]


# Each reader, with a cluster of such objects.


@pytest.fixture
def api() -> FakeKubernetes:
    """A cluster in which most of what may be null or absent is."""
    made = FakeKubernetes()
    for name in ("csinode-no-driver", "csinode-two-drivers"):
        made.add(recorded(name), "csinodes")
    for name in ("node-fresh", "node-in-use-not-ready"):
        made.add(recorded(name), "nodes")
    for name in ("pv-nfs", "pv-csi"):
        made.add(recorded(name), "persistentvolumes")
    made.add(recorded("csidriver-minimal"), "csidrivers")
    made.add(recorded("runtimeclass"), "runtimeclasses")
    return made


UNREACHABLE, NOT_READY = "node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"


@pytest.mark.parametrize(
    ("taints", "ready", "driver", "gone"),
    [
        ((UNREACHABLE, TAINT), "Unknown", DRIVER, "id-of-lost"),
        ((TAINT,), "False", DRIVER, "id-of-lost"),
        ((TAINT,), "", DRIVER, "id-of-lost"),
        # a kubelet that shuts down in order removes the driver from the CSINode object
        ((TAINT,), "Unknown", "other.example.com", "lost"),
        ((TAINT,), "True", DRIVER, ""),
        ((UNREACHABLE,), "Unknown", DRIVER, ""),
        ((NOT_READY,), "False", DRIVER, ""),
        (None, "", DRIVER, ""),
    ],
)
async def test_node_is_lost_by_its_taint_if_no_kubelet_reports(
    client: KubernetesApi,
    api: FakeKubernetes,
    taints: tuple[str, ...] | None,
    ready: str,
    driver: str,
    gone: str,
) -> None:
    """Beside nodes without a CSI driver. Without taints there is no Node object, which proves nothing."""
    if taints is not None:
        status = {"conditions": [{"type": "Ready", "status": ready}] if ready else []}
        spec = {"taints": [{"key": taint, "effect": "NoExecute"} for taint in taints]}
        api.add_object("nodes", "lost", spec=spec, status=status)
    drivers = [
        {"name": "third.example.com", "nodeID": "3"},
        {"name": driver, "nodeID": "id-of-lost"},
    ]
    api.add_object("csinodes", "lost", spec={"drivers": drivers})
    assert await OutOfServiceNodes(client, DRIVER).ids() == {gone} - {""}


@pytest.mark.parametrize(("name", "handler"), [("pod-plain", ""), ("pod-runtimeclass", "kata")])
async def test_handler_of_a_recorded_pod_is_known(
    client: KubernetesApi, api: FakeKubernetes, name: str, handler: str
) -> None:
    pod = recorded(name)
    pod["spec"]["nodeName"] = "worker-1"
    api.add(pod, "pods")
    runtimes = PodRuntimes(client, "worker-1")
    assert await runtimes.handler_of(PodName("shop", "db-0", UID)) == handler
    async with runtimes.following(Health()):
        await asyncio.to_thread(api.wait_for_watch, "pods")
        assert await runtimes.handler_of(PodName("shop", "db-0", UID)) == handler


async def test_follower_goes_on_after_an_error_that_nobody_foresaw(
    client: KubernetesApi, api: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_api, "_PAUSES_S", (0.0,))
    failing = [RuntimeError("unforeseen"), MemoryError()]

    def keep(node: objects.Node) -> str:
        if failing:
            raise failing.pop()
        return node.name

    followed = Followed(client, objects.Node, keep)
    async with kubernetes_api.following(Health(), followed):
        await asyncio.to_thread(api.wait_for_watch, "nodes")
        assert set(followed.known) == {"fresh-1", "worker-1"}
