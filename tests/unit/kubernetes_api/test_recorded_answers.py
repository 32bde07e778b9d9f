"""Each reader, with a cluster of objects as Kubernetes' own Go types write them (tests/data/kubernetes)."""

import asyncio

import pytest

from crust.core.supervised import Health
from crust.kubernetes_api import api as kubernetes_api
from crust.kubernetes_api import objects
from crust.kubernetes_api.api import Informer, KubernetesApi
from crust.kubernetes_api.pod_runtimes import PodName, PodRuntimes
from crust.kubernetes_api.volumes_in_use import TAINT, out_of_service
from tests.support.nodes.fake_kubernetes import FakeKubernetes, recorded
from tests.support.nodes.recorded_server import DRIVER, UID


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
    assert await out_of_service(client, DRIVER) == {gone} - {""}


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
        return node.metadata.name

    followed = Informer(client, objects.Node, keep)
    async with kubernetes_api.following(Health(), followed):
        await asyncio.to_thread(api.wait_for_watch, "nodes")
        assert set(followed.known) == {"fresh-1", "worker-1"}
