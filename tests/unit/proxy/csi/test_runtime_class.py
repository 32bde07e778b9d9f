"""A proxy that asks the Kubernetes API which pods run in a microVM."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from crust.core.settings.proxy import KubernetesSettings
from tests.support.faults.refusals import refused
from tests.support.nodes import fake_kubernetes
from tests.support.nodes import node as nodes
from tests.support.nodes.fake_kubernetes import FakeKubernetes
from tests.support.nodes.node import Node, Places

Code = grpc.StatusCode


@pytest.fixture
def api() -> FakeKubernetes:
    return fake_kubernetes.with_a_microvm()


@pytest.fixture
def settings(api: FakeKubernetes, tmp_path: Path) -> Iterator[KubernetesSettings]:
    with fake_kubernetes.asked_by_a_proxy(api, tmp_path) as settings:
        yield settings


@pytest_asyncio.fixture
async def node(places: Places, settings: KubernetesSettings) -> AsyncIterator[Node]:
    async with (
        nodes.running(places, defer="runtime-class", kubernetes=settings) as running,
        running.handler(),
    ):
        yield running


def info(pod: str) -> dict[str, str]:
    keys = {"name": pod, "namespace": "default", "uid": f"uid-{pod}"}
    return {f"csi.storage.k8s.io/pod.{key}": value for key, value in keys.items()}


async def test_pod_of_a_microvm_gets_the_device_and_another_pod_the_mount(node: Node) -> None:
    vm, plain = node.places.target("vm"), node.places.target("plain")
    await node.co.publish("vol-1", vm, defer=False, volume_context=info("vm"))
    node.check_published("vol-1", vm)
    entry = node.entry(vm)
    assert entry is not None
    assert "default/vm has the handler kata" in entry.require().decided_by
    await node.co.publish("vol-2", plain, defer=False, volume_context=info("plain"))
    assert node.entry(plain) is None
    assert not node.driver.published[plain].deferred


async def test_publish_while_the_api_is_away_is_retried_and_changes_nothing(
    node: Node, api: FakeKubernetes
) -> None:
    target = node.places.target("new")
    api.faults.status = 503
    publish = node.co.publish("vol-1", target, defer=False, volume_context=info("new"))
    await refused(publish, Code.UNAVAILABLE, "default/new", "KubernetesApiUnavailable")
    node.check_untouched(target)
    api.faults.status = 0
    api.add_pod("new", "uid-new", "microvm")
    await node.co.publish("vol-1", target, defer=False, volume_context=info("new"))
    node.check_published("vol-1", target)


async def test_repeated_publish_of_a_deferred_volume_asks_nobody(
    node: Node, api: FakeKubernetes
) -> None:
    target = node.places.target("vm")
    await node.co.publish("vol-1", target, defer=False, volume_context=info("vm"))
    api.faults.status = 503
    await node.co.publish("vol-1", target, defer=False, volume_context=info("vm"))
    node.check_published("vol-1", target)


async def test_a_proxy_starts_while_the_api_is_away(
    places: Places, settings: KubernetesSettings, api: FakeKubernetes
) -> None:
    api.faults.status = 503
    async with nodes.running(places, kubernetes=settings) as node, node.handler():
        await asyncio.to_thread(api.arrivals.acquire)
        target = places.target("one")
        await node.co.publish("vol-1", target)
        node.check_published("vol-1", target)
