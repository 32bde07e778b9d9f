"""A deferred volume that a node reports in use is not detached from it, by force either."""

import threading
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from crust.deferral_keys import Defer
from crust.kubernetes_api import api as kubernetes_api
from crust.kubernetes_api.volumes_in_use import VolumesInUse
from tests.support.nodes.fake_kubernetes import FakeKubernetes

DRIVER, VOLUME = "csi.example.com", "vol-1"
ALWAYS = {"crust.dev/defer": "always"}


def report(api: FakeKubernetes, *volumes: str, taint: str = "") -> None:
    """What the node reports in use."""
    status = {"volumesInUse": [f"kubernetes.io/csi/{DRIVER}^{each}" for each in volumes]}
    taints = [{"key": taint, "effect": "NoExecute"}] if taint else []
    api.add_object("nodes", "node-a", spec={"taints": taints}, status=status)


def volume(api: FakeKubernetes, attributes: dict[str, str], name: str = "pv-1") -> None:
    csi = {"driver": DRIVER, "volumeHandle": VOLUME, "volumeAttributes": attributes}
    api.add_object("persistentvolumes", name, spec={"csi": csi})


@pytest.fixture
def api() -> FakeKubernetes:
    api = FakeKubernetes()
    drivers = [{"name": DRIVER, "nodeID": "id-of-a"}, {"name": "other", "nodeID": "id-of-b"}]
    api.add_object("csinodes", "node-a", spec={"drivers": drivers})
    report(api, VOLUME)
    volume(api, ALWAYS)
    return api


@pytest_asyncio.fixture
async def users(kubeconfig: str) -> AsyncIterator[VolumesInUse]:
    client = kubernetes_api.client(kubeconfig)
    yield VolumesInUse(client, Defer.NEVER)
    await client.close()


@pytest_asyncio.fixture
async def deferring(kubeconfig: str) -> AsyncIterator[VolumesInUse]:
    """On whose nodes a volume that says nothing is deferred."""
    client = kubernetes_api.client(kubeconfig)
    yield VolumesInUse(client, Defer.RUNTIME_CLASS)
    await client.close()


async def user(users: VolumesInUse, node_id: str = "id-of-a") -> str:
    return await users.user_of(DRIVER, VOLUME, node_id)


@pytest.mark.parametrize("wanted", ["always", "runtime-class"])
async def test_deferred_volume_that_the_node_reports_is_in_use(
    api: FakeKubernetes, users: VolumesInUse, wanted: str
) -> None:
    volume(api, {"crust.dev/defer": wanted})
    assert await user(users) == "node-a"


@pytest.mark.parametrize("attributes", [{}, {"crust.dev/defer": "never"}])
async def test_volume_that_is_not_deferred_is_kubernetes_business(
    api: FakeKubernetes, users: VolumesInUse, attributes: dict[str, str]
) -> None:
    volume(api, attributes)
    assert await user(users) == ""


async def test_volume_that_says_nothing_is_in_use_where_the_default_defers(
    api: FakeKubernetes, deferring: VolumesInUse
) -> None:
    """A PersistentVolume that was made by hand, or before crust was there."""
    volume(api, {})
    assert await user(deferring) == "node-a"
    volume(api, {"crust.dev/defer": "never"})
    assert await user(deferring) == ""


@pytest.mark.parametrize("deferred", ["pv-0", "pv-2"])
async def test_volume_with_two_objects_of_which_one_defers_is_in_use(
    api: FakeKubernetes, users: VolumesInUse, deferred: str
) -> None:
    """People make such objects for one volume; which of them the pod used is not known here."""
    volume(api, {})
    volume(api, ALWAYS, deferred)
    assert await user(users) == "node-a"


async def test_volume_that_no_csi_source_names_is_judged_by_the_default(
    api: FakeKubernetes, users: VolumesInUse, deferring: VolumesInUse
) -> None:
    """One that Kubernetes has migrated from an in-tree plugin has no volume attributes."""
    api.remove_object("persistentvolumes", "pv-1")
    assert await user(users) == ""
    assert await user(deferring) == "node-a"


async def test_volume_that_the_node_has_unmounted_is_free(
    api: FakeKubernetes, users: VolumesInUse
) -> None:
    report(api, "vol-2")
    assert await user(users) == ""


async def test_node_that_a_person_declared_dead_uses_nothing(
    api: FakeKubernetes, users: VolumesInUse
) -> None:
    report(api, VOLUME, taint="node.kubernetes.io/not-ready")
    assert await user(users) == "node-a"
    report(api, VOLUME, taint="node.kubernetes.io/out-of-service")
    assert await user(users) == ""


async def test_node_that_is_gone_uses_nothing(api: FakeKubernetes, users: VolumesInUse) -> None:
    api.remove_object("nodes", "node-a")
    assert await user(users) == ""


async def test_id_of_another_node_or_driver_is_not_that_node(
    api: FakeKubernetes, users: VolumesInUse
) -> None:
    assert await user(users, "id-of-b") == ""


async def test_api_that_is_away_decides_nothing(api: FakeKubernetes, users: VolumesInUse) -> None:
    api.faults.status = 503
    with pytest.raises(kubernetes_api.KubernetesApiUnavailable, match="not now"):
        await user(users)


async def test_slow_api_decides_nothing(
    api: FakeKubernetes, users: VolumesInUse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_api, "_ASK_S", 0.2)
    api.faults.hangs = held = threading.Event()
    try:
        with pytest.raises(kubernetes_api.KubernetesApiUnavailable, match="no answer within"):
            await user(users)
    finally:
        held.set()
