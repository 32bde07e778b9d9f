"""A deferred volume is detached only where no node is left that may use it, by force either."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from crust.core import errors
from crust.core.supervised import Health
from crust.kubernetes_api import api as kubernetes_api
from crust.kubernetes_api.volumes_in_use import VolumesInUse
from tests.support.nodes.fake_kubernetes import FakeKubernetes, recorded
from tests.support.raised import raised

DRIVER, VOLUME, NODE = "block.csi.crust.dev", "vol-1", "worker-1"
ALWAYS, NEVER = {"crust.dev/defer": "always"}, {"crust.dev/defer": "never"}
FOLLOWED = ("persistentvolumes", "volumeattachments", "csinodes")
DELETED, BEFORE, AFTER = (f"2026-07-01T12:00:0{second}Z" for second in (5, 4, 6))
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"


class Cluster:
    """Real objects of a cluster in which node worker-1 has the volume attached, and in use."""

    def __init__(self) -> None:
        self.api = FakeKubernetes()
        self.api.add(recorded("csinode-no-driver"), "csinodes")
        self.api.add(recorded("pv-nfs"), "persistentvolumes")
        self.attached(NODE)
        self.volume(ALWAYS)
        self.node(NODE, VOLUME)
        self.registered(NODE)

    def node(
        self,
        name: str,
        *in_use: str,
        taint: str = "",
        ready: str = "Unknown",
        since: str | None = BEFORE,
        boot: str = "1",
    ) -> None:
        """A Node object, and the volumes that its kubelet reports."""
        node = recorded("node-in-use-not-ready")
        node["metadata"] = {**node["metadata"], "name": name}
        condition = {"type": "Ready", "status": ready, "lastTransitionTime": since}
        node["status"]["conditions"] = [condition] if ready else []
        node["status"]["nodeInfo"] = {"bootID": boot}
        node["status"]["volumesInUse"] = [f"kubernetes.io/csi/{DRIVER}^{id_}" for id_ in in_use]
        node["spec"] = {"taints": [{"key": taint, "effect": "NoExecute"}]} if taint else {}
        self.api.add(node, "nodes")

    def registered(self, name: str, node_id: str = NODE, uid: str = "uid-1") -> None:
        """Its CSINode object. Without an id no driver is registered, as after an orderly stop of crust."""
        drivers = [{"name": DRIVER, "nodeID": node_id, "topologyKeys": None}] if node_id else None
        metadata = {"name": name, "uid": uid}
        self.api.add({"metadata": metadata, "spec": {"drivers": drivers}}, "csinodes")

    def volume(
        self, attributes: dict[str, str] | None, name: str = "pv-1", handle: str = VOLUME
    ) -> None:
        volume = recorded("pv-csi")
        volume["metadata"] = {**volume["metadata"], "name": name}
        volume["spec"]["csi"] |= {"volumeAttributes": attributes, "volumeHandle": handle}
        self.api.add(volume, "persistentvolumes")

    def attached(self, node: str, volume: str = "pv-1") -> None:
        attachment = recorded("volumeattachment-detach-error")
        name = f"csi-{node}-{volume}"
        changed = {"name": name, "deletionTimestamp": DELETED, "uid": name}
        attachment["metadata"] = {**attachment["metadata"], **changed}
        attachment["spec"]["nodeName"] = node
        attachment["spec"]["source"] = {"persistentVolumeName": volume}
        self.api.add(attachment, "volumeattachments")


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def api(cluster: Cluster) -> FakeKubernetes:
    return cluster.api


class Controllers:
    """Controllers of the cluster: what a test arranges before `detach` is what it has listed."""

    def __init__(self, client: kubernetes_api.KubernetesApi, api: FakeKubernetes) -> None:
        self.client = client
        self.api = api
        self.now = 0.0
        self.requests: list[str] = []

    async def detach(self, node_id: str = NODE) -> None:
        users = VolumesInUse(self.client, now=lambda: self.now)
        async with users.following(Health()):
            await self.listed()
            await self.ask(users, node_id)

    async def listed(self) -> None:
        """Wait for the lists of the start, which are no part of a detach."""
        for collection in FOLLOWED:
            await asyncio.to_thread(self.api.wait_for_watch, collection)

    async def ask(self, users: VolumesInUse, node_id: str = NODE) -> None:
        """Also notes which requests the question itself needed."""
        before = len(self.asked())
        try:
            await users.check_detach(DRIVER, VOLUME, node_id)
        finally:
            self.requests = self.asked()[before:]

    def asked(self) -> list[str]:
        return [path for path in self.api.requests if not path.endswith(FOLLOWED)]


@pytest.fixture
def controller(client: kubernetes_api.KubernetesApi, api: FakeKubernetes) -> Controllers:
    return Controllers(client, api)


def used() -> Any:
    return raised("UsedOnNode", errors.NotReady, match=f"from node {NODE}: the node reports it")


def unknown(why: str) -> Any:
    return raised("VolumeUseUnknown", errors.NotReady, match=why)


@pytest.mark.parametrize("wanted", ["always", "runtime-class"])
async def test_deferred_volume_is_detached_once_node_does_not_report_it(
    cluster: Cluster, controller: Controllers, wanted: str
) -> None:
    cluster.volume({"crust.dev/defer": wanted})
    with used():
        await controller.detach()
    cluster.node(NODE, "vol-2")
    await controller.detach()
    assert controller.requests == [f"/api/v1/nodes/{NODE}"]


# Which nodes: whatever objects are there.


async def test_unregistered_driver_keeps_users(cluster: Cluster, controller: Controllers) -> None:
    """An orderly stop of crust removes the driver from CSINode: the guest lives on, and nobody can unmount."""
    cluster.registered(NODE, node_id="")
    with used():
        await controller.detach("an-id-that-is-not-the-name")
    cluster.api.remove_object("csinodes", NODE)
    with used():
        await controller.detach("an-id-that-is-not-the-name")
    cluster.node(NODE)
    await controller.detach("an-id-that-is-not-the-name")


@pytest.mark.parametrize("collection", ["volumeattachments", "persistentvolumes", "csinodes"])
async def test_any_one_object_may_be_absent(
    cluster: Cluster, controller: Controllers, collection: str
) -> None:
    names = {"volumeattachments": f"csi-{NODE}-pv-1", "persistentvolumes": "pv-1", "csinodes": NODE}
    cluster.api.remove_object(collection, names[collection])
    with used():
        await controller.detach()


async def test_unknown_node_is_refused(cluster: Cluster, controller: Controllers) -> None:
    with unknown("the node id 'elsewhere' is not known"):
        await controller.detach("elsewhere")
    cluster.api.remove_object("volumeattachments", f"csi-{NODE}-pv-1")
    with unknown("no node is named"):
        await controller.detach("")


async def test_another_node_may_use_the_volume(cluster: Cluster, controller: Controllers) -> None:
    cluster.node("worker-2")
    cluster.registered("worker-2", "id-2")
    cluster.attached("worker-2")
    await controller.detach("id-2")
    assert controller.requests == ["/api/v1/nodes/worker-2"]


async def test_detach_from_all_nodes_asks_each(cluster: Cluster, controller: Controllers) -> None:
    cluster.node("worker-0")
    cluster.attached("worker-0")
    cluster.attached("worker-9", "pv-of-another-volume")
    with used():
        await controller.detach("")
    assert controller.requests == ["/api/v1/nodes/worker-0", f"/api/v1/nodes/{NODE}"]
    cluster.node(NODE)
    await controller.detach("")
    for number in range(2, 4):
        cluster.attached(f"worker-{number}")
    with unknown("4 nodes may have it"):
        await controller.detach("")
    assert controller.requests == []


async def test_inline_volume_has_its_handle(cluster: Cluster, controller: Controllers) -> None:
    """Of a pod with an in-tree source that Kubernetes migrated: there is no PersistentVolume, and no attribute."""
    for collection, name in (
        ("volumeattachments", f"csi-{NODE}-pv-1"),
        ("persistentvolumes", "pv-1"),
    ):
        cluster.api.remove_object(collection, name)
    cluster.registered(NODE, node_id="")
    attachment = recorded("volumeattachment-inline")
    attachment["spec"]["source"]["inlineVolumeSpec"]["csi"]["volumeHandle"] = VOLUME
    cluster.api.add(attachment, "volumeattachments")
    with used():
        await controller.detach()


@pytest.mark.parametrize("others", [2, 5000])
async def test_detach_takes_one_request_however_many_nodes_there_are(
    cluster: Cluster, controller: Controllers, others: int
) -> None:
    for number in range(others):
        name = f"node-{number:04}"
        cluster.registered(name, f"id-{number}" if number % 2 else "")
        cluster.attached(name, f"pv-{number + 100}")
        cluster.node(name)
    users = VolumesInUse(controller.client)
    async with users.following(Health()):
        await controller.listed()
        for node_id in (NODE, ""):
            with used():
                await controller.ask(users, node_id)
            assert controller.requests == [f"/api/v1/nodes/{NODE}"]


# Which volumes.


async def test_volume_that_is_not_deferred_is_kubernetes_business(
    cluster: Cluster, controller: Controllers
) -> None:
    cluster.volume(NEVER)
    await controller.detach()
    await controller.detach("elsewhere")
    assert controller.requests == []


@pytest.mark.parametrize(
    "attributes",
    [None, {}, {"crust.dev/encryption": "luks"}, {"crust.dev/format-in": "guest"}],
)
async def test_volume_without_a_choice_may_be_deferred(
    cluster: Cluster, controller: Controllers, attributes: dict[str, str] | None
) -> None:
    """One of a class that leaves it to the nodes, or that was made by hand, or before crust was there."""
    cluster.volume(attributes)
    with used():
        await controller.detach()


async def test_migrated_volume_may_be_deferred(cluster: Cluster, controller: Controllers) -> None:
    """Its object has the source of the in-tree plugin, and no attributes."""
    cluster.api.remove_object("persistentvolumes", "pv-1")
    cluster.attached(NODE, "pv-nfs")
    with used():
        await controller.detach()


@pytest.mark.parametrize("deferred", ["pv-0", "pv-2"])
async def test_volume_deferred_by_one_of_two_objects_is_in_use(
    cluster: Cluster, controller: Controllers, deferred: str
) -> None:
    """People make such objects for one volume; which of them the pod used is not known here."""
    cluster.volume(NEVER)
    cluster.volume(ALWAYS, deferred)
    with used():
        await controller.detach()


# Which nodes are gone.


async def test_node_declared_dead_uses_nothing(cluster: Cluster, controller: Controllers) -> None:
    """If no kubelet of it reports."""
    for taint, ready in (("node.kubernetes.io/unreachable", "Unknown"), (OUT_OF_SERVICE, "True")):
        cluster.node(NODE, VOLUME, taint=taint, ready=ready)
        with used():
            await controller.detach()
    cluster.api.add(recorded("node-out-of-service"), "nodes")
    await controller.detach()


@pytest_asyncio.fixture
async def users(controller: Controllers) -> AsyncIterator[VolumesInUse]:
    """Of one controller that lives through the test."""
    made = VolumesInUse(controller.client, now=lambda: controller.now)
    async with made.following(Health()):
        await controller.listed()
        yield made


async def test_node_without_its_object_is_gone_after_five_minutes(
    cluster: Cluster, controller: Controllers, users: VolumesInUse
) -> None:
    cluster.api.remove_object("nodes", NODE)
    for controller.now in (0.0, 100.0, 299.0):
        with unknown(f"no Node object since {controller.now:.0f} s, and is gone after 300 s"):
            await controller.ask(users)
    controller.now = 300.0
    await controller.ask(users)


@pytest.mark.parametrize("seen", ["by its Node object", "by another CSINode object"])
async def test_node_that_was_there_in_between_was_not_absent(
    cluster: Cluster, controller: Controllers, users: VolumesInUse, seen: str
) -> None:
    """Nobody need have looked while it was there: its CSINode object is another one."""
    cluster.api.remove_object("nodes", NODE)
    with unknown("since 0 s"):
        await controller.ask(users)
    if seen == "by its Node object":
        cluster.node(NODE, VOLUME)
        with used():
            await controller.ask(users)
        cluster.api.remove_object("nodes", NODE)
    else:
        cluster.registered(NODE, uid="uid-2")
        while users._registered.known[NODE].metadata.uid != "uid-2":  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0)
    controller.now = 300.0
    with unknown("since 0 s"):
        await controller.ask(users)


async def test_silent_kubelet_is_no_answer(cluster: Cluster, controller: Controllers) -> None:
    """A Node object that was deleted and made again has an empty status until the kubelet fills it."""
    fresh = recorded("node-fresh")
    fresh["metadata"]["name"] = NODE
    cluster.api.add(fresh, "nodes")
    with unknown("has not reported since its Node object was made"):
        await controller.detach()


@pytest.mark.parametrize("since", [DELETED, AFTER, None])
async def test_node_lost_or_back_since_detach_began_is_no_answer(
    cluster: Cluster, controller: Controllers, since: str | None
) -> None:
    """Kubernetes reports the volume as attached no more: a kubelet that starts then does not list it as in use."""
    for ready in ("True", "Unknown"):
        cluster.node(NODE, ready=ready, since=since)
        with unknown("after Kubernetes began to detach"):
            await controller.detach()
    cluster.node(NODE, taint=OUT_OF_SERVICE, since=since)
    await controller.detach()


async def test_node_that_booted_since_detach_began_has_no_guest(
    cluster: Cluster, controller: Controllers
) -> None:
    users = VolumesInUse(controller.client)
    async with users.following(Health()):
        await controller.listed()
        for boot in ("1", "1", ""):
            cluster.node(NODE, ready="True", since=AFTER, boot=boot)
            with unknown("after Kubernetes began to detach"):
                await controller.ask(users)
        cluster.node(NODE, VOLUME, ready="True", since=AFTER, boot="2")
        with used():
            await controller.ask(users)
        cluster.node(NODE, ready="True", since=AFTER, boot="2")
        await controller.ask(users)


async def test_boot_of_another_detach_proves_nothing(
    cluster: Cluster, controller: Controllers
) -> None:
    cluster.volume(ALWAYS, "pv-2", "vol-2")
    cluster.attached(NODE, "pv-2")
    users = VolumesInUse(controller.client)
    async with users.following(Health()):
        await controller.listed()
        with used():
            await controller.ask(users)
        cluster.node(NODE, ready="True", since=AFTER, boot="2")
        with unknown("after Kubernetes began to detach"):
            await users.check_detach(DRIVER, "vol-2", NODE)
        await controller.ask(users)


# The API server itself.


async def test_api_that_is_away_decides_nothing(
    api: FakeKubernetes,
    controller: Controllers,
    users: VolumesInUse,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api.faults.status = 503
    with pytest.raises(kubernetes_api.KubernetesApiUnavailable, match="Node worker-1"):
        await controller.ask(users)
    monkeypatch.setattr(kubernetes_api, "_WAIT_S", 0.2)
    without_lists, answered = VolumesInUse(controller.client), asyncio.Event()
    lost = kubernetes_api.Informer._lost

    def noted(followed: kubernetes_api.Informer[Any, Any], error: Exception) -> None:
        lost(followed, error)
        if followed is without_lists._attachments:  # it is asked first
            answered.set()

    monkeypatch.setattr(kubernetes_api.Informer, "_lost", noted)
    async with without_lists.following(Health()):
        await answered.wait()
        with pytest.raises(kubernetes_api.KubernetesApiUnavailable, match=r"vol-1.*not now"):
            await controller.ask(without_lists)


async def test_slow_api_decides_nothing(
    api: FakeKubernetes,
    controller: Controllers,
    users: VolumesInUse,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kubernetes_api, "_ASK_S", 0.2)
    api.faults.hangs = held = threading.Event()
    try:
        with pytest.raises(kubernetes_api.KubernetesApiUnavailable, match="no answer within"):
            await controller.ask(users)
    finally:
        held.set()
