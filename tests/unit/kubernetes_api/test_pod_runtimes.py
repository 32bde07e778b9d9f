"""The runtime handler of a pod, from an API server that is there, away, slow, or behind."""

import asyncio
from pathlib import Path

import pytest

from crust.core.supervised import Health
from crust.kubernetes_api import api as kubernetes_api
from crust.kubernetes_api.pod_runtimes import PodName, PodRuntimes
from tests.support.nodes import fake_kubernetes
from tests.support.nodes.fake_kubernetes import NODE, FakeKubernetes
from tests.support.raised import raised

WEB = PodName("default", "web", "uid-1")


@pytest.fixture
def api() -> FakeKubernetes:
    api = FakeKubernetes()
    api.add_class("microvm", "kata")
    return api


@pytest.fixture
def runtimes(client: kubernetes_api.KubernetesApi) -> PodRuntimes:
    return PodRuntimes(client, NODE)


async def watched(api: FakeKubernetes) -> None:
    """Wait until a watch of pods has begun, and one of classes is there."""
    await asyncio.to_thread(api.watches.acquire)
    await asyncio.to_thread(api.wait_for_watch, "runtimeclasses")


async def test_another_pod_of_same_name_is_not_treated_as_it(
    api: FakeKubernetes, runtimes: PodRuntimes
) -> None:
    """Neither an earlier one, which a server that lags behind still has, nor a later one."""
    for uid in ("uid-2", "uid-0"):
        api.add_pod("web", uid, "microvm")
        with raised("PodUnknown", match="uid-1"):
            await runtimes.handler_of(WEB)
    api.faults.lagging = True
    api.add_pod("web", "uid-1", "microvm")
    with raised("PodUnknown", match="uid-1"):
        await runtimes.handler_of(WEB)
    api.faults.lagging = False
    assert await runtimes.handler_of(WEB) == "kata"
    api.requests.clear()
    assert await runtimes.handler_of(WEB) == "kata"
    assert api.requests == [], "a pod is asked for once"


async def test_runtime_class_that_does_not_exist_is_named(
    api: FakeKubernetes, runtimes: PodRuntimes
) -> None:
    api.add_pod("web", "uid-1", "gone")
    with raised("RuntimeClassMissing", match="'gone'"):
        await runtimes.handler_of(WEB)


@pytest.mark.parametrize("status", [401, 403, 500, 503])
async def test_refusal_of_the_server_is_unavailable_and_shows_no_token(
    api: FakeKubernetes, runtimes: PodRuntimes, status: int
) -> None:
    api.faults.status = status
    with pytest.raises(kubernetes_api.KubernetesApiUnavailable) as caught:
        await runtimes.handler_of(WEB)
    assert fake_kubernetes.TOKEN not in caught.value.shown()


async def test_server_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with fake_kubernetes.serving(FakeKubernetes(), tmp_path) as kubeconfig:
        client = kubernetes_api.client(kubeconfig)
    try:
        with pytest.raises(kubernetes_api.KubernetesApiUnavailable):
            await PodRuntimes(client, NODE).handler_of(WEB)
    finally:
        await client.close()


async def test_pod_that_was_followed_is_known_while_server_is_away(
    api: FakeKubernetes, runtimes: PodRuntimes
) -> None:
    api.add_pod("listed", "uid-0", "microvm")
    async with runtimes.following(Health()):
        await watched(api)
        api.add_pod("web", "uid-1", "microvm")
        assert await runtimes.handler_of(WEB) == "kata"
        api.faults.status = 503
        assert await runtimes.handler_of(WEB) == "kata"
        assert await runtimes.handler_of(PodName("default", "listed", "uid-0")) == "kata"


async def test_pods_of_a_node_are_listed_from_the_servers_cache(
    api: FakeKubernetes, runtimes: PodRuntimes
) -> None:
    """The newest state would be read from etcd: the pods of all nodes, for each node."""
    async with runtimes.following(Health()):
        await watched(api)
    assert api.listed == {"pods": "0", "runtimeclasses": ""}


async def test_watch_from_a_compacted_version_begins_again_with_a_list(
    api: FakeKubernetes, runtimes: PodRuntimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_api, "_PAUSES_S", (0.0,))
    async with runtimes.following(Health()):
        await watched(api)
        api.compact()
        api.add_pod("web", "uid-1", "microvm")
        await watched(api)
        assert await runtimes.handler_of(WEB) == "kata"
        assert "/api/v1/namespaces/default/pods/web" not in api.requests


async def test_following_continues_after_an_outage(
    api: FakeKubernetes, runtimes: PodRuntimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_api, "_PAUSES_S", (0.0,))
    api.faults.status = 503
    async with runtimes.following(Health()):
        for _ in range(3):
            await asyncio.to_thread(api.arrivals.acquire)
        api.add_pod("web", "uid-1", "microvm")
        api.faults.status = 0
        await watched(api)
        api.requests.clear()
        assert await runtimes.handler_of(WEB) == "kata"
        assert api.requests == []


async def test_class_that_was_made_again_has_its_new_handler(
    api: FakeKubernetes, runtimes: PodRuntimes
) -> None:
    api.add_pod("web", "uid-1", "microvm")
    async with runtimes.following(Health()):
        await watched(api)
        assert await runtimes.handler_of(WEB) == "kata"
        await asyncio.to_thread(api.wait_for_watch, "runtimeclasses")
        api.add_class("microvm", "other")
        while await runtimes.handler_of(WEB) != "other":  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0)
