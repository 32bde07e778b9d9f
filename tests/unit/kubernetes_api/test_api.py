"""The client of the Kubernetes API: pages, watches, refusals, and answers that are none."""

import asyncio
import errno
import json
import os
from pathlib import Path

import httpx2
import pytest

from crust.kubernetes_api import api as kubernetes_api
from crust.kubernetes_api import objects
from crust.kubernetes_api.api import KubernetesApi
from tests.support.nodes import fake_kubernetes
from tests.support.nodes.fake_kubernetes import FakeKubernetes, recorded
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


async def test_expiry_between_two_pages_is_unavailable(server: Server) -> None:
    first = {"metadata": {"continue": "here"}, "items": [recorded("csinode-no-driver")]}
    answers = iter([(200, first), (410, recorded("status-gone"))])

    def answer(_: httpx2.Request) -> httpx2.Response:
        code, body = next(answers)
        return httpx2.Response(code, json=body)

    transport = httpx2.MockTransport(answer)
    async with httpx2.AsyncClient(transport=transport, base_url="http://it") as http:
        with pytest.raises(kubernetes_api.KubernetesApiUnavailable, match="too old"):
            await KubernetesApi(http).listing(objects.CSINode)


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


@pytest.mark.parametrize("fails", [False, True])
async def test_watch_that_ended_is_listed_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
    fails: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """A server that restarts ends the watches of all nodes at one moment. Until the list the objects are not known.

    The watch that fails ends by the connection's timeout, which is not the end of the list's time.
    """
    lists: list[str] = []
    pauses: list[float] = []
    second = asyncio.Event()

    async def answer(request: httpx2.Request) -> httpx2.Response:
        if "watch=true" in str(request.url):
            if fails:
                raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            return httpx2.Response(200, content=b"")
        lists.append(str(request.url))
        if len(lists) == 2:
            second.set()
            await asyncio.Event().wait()
        return httpx2.Response(200, json=recorded("csinode-list"))

    def noted(time_s: float) -> float:
        pauses.append(time_s)
        return time_s if time_s > 60 else 0.0

    monkeypatch.setattr(kubernetes_api, "scattered", noted)
    monkeypatch.setattr(kubernetes_api, "_WAIT_S", 0.0)
    transport = httpx2.MockTransport(answer)
    async with httpx2.AsyncClient(transport=transport, base_url="http://it") as http:
        followed = kubernetes_api.Informer(KubernetesApi(http), objects.CSINode, lambda node: node)
        following = asyncio.create_task(followed.follow())
        await second.wait()
        with pytest.raises(kubernetes_api.KubernetesApiUnavailable):
            await followed.check_known("it")
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    assert min(pauses) >= 1
    assert ("timed out" in followed.failure) is fails


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
        f"{_CLUSTER}\n{_CONTEXT}".replace("SERVER", "http://it"),
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


_PLUGIN_ANSWER = json.dumps({"status": {"token": fake_kubernetes.TOKEN}})


def _with_user(kubeconfig: str, user: dict[str, object]) -> str:
    config = json.loads(Path(kubeconfig).read_text())
    config["users"] = [{"name": "it", "user": user}]
    Path(kubeconfig).write_text(json.dumps(config))
    return kubeconfig


def _plugin(directory: Path, answer: str, version: str = "v1beta1") -> dict[str, object]:
    program = directory / "plugin"
    program.write_text(f"#!/bin/sh\necho '{answer}'\n")
    program.chmod(0o700)
    return {"apiVersion": f"client.authentication.k8s.io/{version}", "command": str(program)}


@pytest.mark.parametrize("version", ["v1alpha1", "v1beta1"])
async def test_exec_plugin_of_a_supported_version_gives_the_token(
    tmp_path: Path, version: str
) -> None:
    api = FakeKubernetes()
    api.add_object("nodes", "a")
    with fake_kubernetes.serving(api, tmp_path) as kubeconfig:
        exec_of_user = _plugin(tmp_path, _PLUGIN_ANSWER, version)
        client = kubernetes_api.client(_with_user(kubeconfig, {"exec": exec_of_user}))
        assert await client.get(objects.Node, "a") is not None
        await client.close()


async def test_exec_plugin_of_another_version_is_refused_at_the_start(tmp_path: Path) -> None:
    with fake_kubernetes.serving(FakeKubernetes(), tmp_path) as kubeconfig:
        _with_user(kubeconfig, {"exec": _plugin(tmp_path, _PLUGIN_ANSWER, "v1")})
        with pytest.raises(kubernetes_api.UnusableKubeconfig, match="apiVersion"):
            kubernetes_api.client(kubeconfig)


@pytest.mark.parametrize(
    "answer",
    [None, "no JSON", "[]", "{}", '{"status": null}', '{"status": "token"}', r"\0377\0377"],
)
async def test_exec_plugin_without_a_token_is_unavailable(
    tmp_path: Path, answer: str | None
) -> None:
    """None: there is no such program."""
    plugin = _plugin(tmp_path, answer or "")
    if answer is None:
        (tmp_path / "plugin").unlink()
    await _check_unavailable(tmp_path, {"exec": plugin})


@pytest.mark.parametrize("content", [None, b"\xff", b"two\nlines"])
async def test_token_file_without_a_token_is_unavailable(
    tmp_path: Path, content: bytes | None
) -> None:
    """None: it is a directory."""
    path = tmp_path / "token"
    path.write_bytes(content) if content is not None else path.mkdir()
    await _check_unavailable(tmp_path, {"tokenFile": str(path)})


async def _check_unavailable(directory: Path, user: dict[str, object]) -> None:
    with fake_kubernetes.serving(FakeKubernetes(), directory) as kubeconfig:
        client = kubernetes_api.client(_with_user(kubeconfig, user))
        with pytest.raises(kubernetes_api.KubernetesApiUnavailable, match="Node a"):
            await client.get(objects.Node, "a")
        await client.close()
