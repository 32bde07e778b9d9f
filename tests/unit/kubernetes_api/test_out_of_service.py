"""Which nodes the cluster has declared gone: by their taint, if no kubelet reports, and by nothing less."""

import threading
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from crust.kubernetes_api import api as kubernetes_api
from crust.kubernetes_api.out_of_service import TAINT, OutOfServiceNodes
from tests.support.nodes.fake_kubernetes import FakeKubernetes

DRIVER = "rbd.csi.crust.dev"


def node(api: FakeKubernetes, name: str, *taints: str, ready: str = "Unknown") -> None:
    """A Node object; `ready` is the status of its condition."""
    status = {"conditions": [{"type": "Ready", "status": ready}] if ready else []}
    spec = {"taints": [{"key": each, "effect": "NoExecute"} for each in taints]}
    api.add_object("nodes", name, spec=spec, status=status)


def registered(api: FakeKubernetes, name: str, **ids: str) -> None:
    """Its CSINode object: the ids of drivers, by the drivers' first words."""
    drivers = [
        {"name": DRIVER if driver == "rbd" else f"{driver}.example.com", "nodeID": each}
        for driver, each in ids.items()
    ]
    api.add_object("csinodes", name, spec={"drivers": drivers})


@pytest.fixture
def api() -> FakeKubernetes:
    api = FakeKubernetes()
    node(api, "node-b", ready="True")
    registered(api, "node-a", other="other-id", rbd="id-of-a")
    registered(api, "node-b", rbd="id-of-b")
    return api


@pytest_asyncio.fixture
async def nodes(kubeconfig: str) -> AsyncIterator[OutOfServiceNodes]:
    client = kubernetes_api.client(kubeconfig)
    yield OutOfServiceNodes(client, DRIVER)
    await client.close()


@pytest.mark.parametrize("ready", ["Unknown", "False", ""])
async def test_tainted_node_that_is_not_ready_is_gone_by_the_drivers_id(
    api: FakeKubernetes, nodes: OutOfServiceNodes, ready: str
) -> None:
    node(api, "node-a", "node.kubernetes.io/unreachable", TAINT, ready=ready)
    assert await nodes.ids() == {"id-of-a"}


async def test_tainted_node_whose_kubelet_reports_is_not_gone(
    api: FakeKubernetes, nodes: OutOfServiceNodes
) -> None:
    node(api, "node-a", TAINT, ready="True")
    assert await nodes.ids() == set()


@pytest.mark.parametrize(
    "taint", ["node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"]
)
async def test_node_that_only_does_not_answer_is_not_gone(
    api: FakeKubernetes, nodes: OutOfServiceNodes, taint: str
) -> None:
    node(api, "node-a", taint)
    assert await nodes.ids() == set()


async def test_node_whose_object_was_deleted_is_not_gone(nodes: OutOfServiceNodes) -> None:
    assert await nodes.ids() == set()


async def test_node_that_the_driver_has_left_is_gone_by_its_name(
    api: FakeKubernetes, nodes: OutOfServiceNodes
) -> None:
    """A kubelet that shuts down in order removes the driver from the CSINode object."""
    node(api, "node-a", TAINT)
    registered(api, "node-a", other="other-id")
    assert await nodes.ids() == {"node-a"}


@pytest.mark.parametrize("status", [401, 403, 503])
async def test_refusal_of_the_server_is_no_answer(
    api: FakeKubernetes, nodes: OutOfServiceNodes, status: int
) -> None:
    node(api, "node-a", TAINT)
    api.faults.status = status
    with pytest.raises(kubernetes_api.KubernetesApiUnavailable, match="Node objects"):
        await nodes.ids()


async def test_slow_server_is_no_answer(
    api: FakeKubernetes, nodes: OutOfServiceNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_api, "_ASK_S", 0.2)
    api.faults.hangs = threading.Event()
    try:
        with pytest.raises(kubernetes_api.KubernetesApiUnavailable, match="no answer within"):
            await nodes.ids()
    finally:
        api.faults.hangs.set()
