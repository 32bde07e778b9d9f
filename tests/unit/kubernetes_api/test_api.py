"""The client of the Kubernetes API: pages, watches, refusals, and answers that are none."""

import errno
import os
from pathlib import Path

import httpx2
import pytest

from crust.kubernetes_api import api as kubernetes_api
from crust.kubernetes_api import objects
from crust.kubernetes_api.api import KubernetesApi
from tests.support.nodes.fake_kubernetes import recorded
from tests.support.nodes.recorded_server import Server, watched


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
    assert [node.metadata.name for node in listed] == ["cp-1", "cp-1", "worker-1"]
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


async def test_connections_timeout_is_no_end_of_a_lists_time() -> None:
    """The list would be asked for again at once, and without end."""
    watches: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        if "watch=true" not in str(request.url):
            return httpx2.Response(200, json=recorded("csinode-list"))
        assert not watches, "listed again, without a pause"
        watches.append(str(request.url))
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    transport = httpx2.MockTransport(answer)
    async with httpx2.AsyncClient(transport=transport, base_url="http://it") as http:
        followed = kubernetes_api.Informer(KubernetesApi(http), objects.CSINode, lambda node: node)
        with pytest.raises(TimeoutError, match="timed out"):
            await followed.follow()
    assert "timed out" in followed.failure


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


_CLUSTER = "clusters: [{name: it, cluster: {server: 'SERVER'}}]"
_CONTEXT = "current-context: it\ncontexts: [{name: it, context: {cluster: it}}]"


@pytest.mark.parametrize(
    "content",
    [
        None,
        "token: [secret",
        "{}",
        "",
        "secret",
        "[secret]",
        "clusters:\ncontexts: []",
        "clusters: [{name: it, cluster: }]",
        f"{_CLUSTER}\ncontexts: []",
        f"{_CLUSTER}\n{_CONTEXT}".replace("SERVER", "api.example.com"),
        f"{_CLUSTER}\n{_CONTEXT}".replace("SERVER", "http://[::1"),
    ],
)
def test_unusable_kubeconfig_is_refused_unseen(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "kubeconfig"
    if content is not None:
        path.write_text(content)
    with pytest.raises(kubernetes_api.UnusableKubeconfig) as caught:
        kubernetes_api.client(str(path))
    assert str(path) in str(caught.value)
    assert "secret" not in caught.value.shown()


def test_no_service_account_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(kubernetes_api.UnusableKubeconfig, match="service account"):
        kubernetes_api.client("")
