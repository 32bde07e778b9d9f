"""Our driver under all four CSIDriver objects, as Kubernetes acts on them, with and without an attach by the CO."""

import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from crust.blockdriver.services.roles import Role
from crust.cli.doctor import csi_driver_objects
from crust.core.settings.proxy import KubernetesSettings, ServedDriver
from crust.host.mounts import mountinfo
from crust.kubernetes_api import api as kubernetes_api
from crust.kubernetes_api.csi_driver import CsiDriverObject
from crust.rpc.port import SocketPort
from crust.wire.csi.v1 import csi_pb2
from tests.integration.chain.conftest import Chain
from tests.support.co import MODE, capability
from tests.support.faults.refusals import refused
from tests.support.nodes import fake_kubernetes
from tests.support.nodes.fake_kubernetes import FakeKubernetes
from tests.support.nodes.served_node import new_places

pytestmark = pytest.mark.root

DRIVER = "block.csi.crust.dev"
WRITER = MODE.SINGLE_NODE_SINGLE_WRITER
_PUBLISH = csi_pb2.ControllerServiceCapability.RPC.PUBLISH_UNPUBLISH_VOLUME


@pytest.fixture
def api() -> FakeKubernetes:
    return fake_kubernetes.with_a_microvm()


@pytest.fixture
def settings(api: FakeKubernetes, tmp_path: Path) -> Iterator[KubernetesSettings]:
    with fake_kubernetes.asked_by_a_proxy(api, tmp_path) as settings:
        yield settings


@pytest.fixture
async def chain(settings: KubernetesSettings) -> AsyncIterator[Chain]:
    with new_places() as places:
        made = Chain(places, kubernetes=settings)
        yield made
        await made.stop()


class Cluster:
    """What Kubernetes does with a volume, by the CSIDriver object that it has."""

    def __init__(self, chain: Chain, driver: CsiDriverObject) -> None:
        self._chain = chain
        self._driver = driver
        self._controller = chain.controller
        self._capability = capability(mode=WRITER)

    async def create(self) -> str:
        return (await self._chain.co.create("pvc", self._capability)).volume_id

    async def attach(self, volume_id: str) -> list[str]:
        """external-attacher, where it is asked to; returns the nodes that have the volume then."""
        capabilities = await self._controller.ControllerGetCapabilities(
            csi_pb2.ControllerGetCapabilitiesRequest(), timeout=30
        )
        publishes = any(each.rpc.type == _PUBLISH for each in capabilities.capabilities)
        if self._driver.attach_required and publishes:
            await self._chain.co.attach(volume_id, "node-1", self._capability)
        got = csi_pb2.ControllerGetVolumeRequest(volume_id=volume_id)
        found = await self._controller.ControllerGetVolume(got, timeout=30)
        return list(found.status.published_node_ids)

    async def publish(self, volume_id: str, pod: str) -> str:
        target = self._chain.places.target(pod)
        context = {"crust.dev/defer": "runtime-class"}
        if self._driver.pod_info_on_mount:
            names = {"name": pod, "namespace": "default", "uid": f"uid-{pod}"}
            context |= {f"csi.storage.k8s.io/pod.{key}": each for key, each in names.items()}
        await self._chain.co.publish(
            volume_id,
            target,
            self._capability,
            defer=False,
            staging=self._chain.staging(),
            volume_context=context,
        )
        return target


COMBINATIONS = [
    pytest.param(*each, id="-".join(map(str, each)))
    for each in itertools.product((True, False), repeat=3)
]


@pytest.mark.parametrize(("attach_required", "pod_info", "publishes"), COMBINATIONS)
async def test_volume_lives_under_each_object(
    chain: Chain,
    api: FakeKubernetes,
    settings: KubernetesSettings,
    *,
    attach_required: bool,
    pod_info: bool,
    publishes: bool,
) -> None:
    chain.role = Role(node_deployment=not publishes)
    spec = {"attachRequired": attach_required, "podInfoOnMount": pod_info}
    api.add_object("csidrivers", DRIVER, spec=spec)
    await chain.start()
    client = kubernetes_api.client(settings.kubeconfig)
    cluster = Cluster(chain, await csi_driver_objects.read(client, DRIVER))
    await client.close()

    volume_id = await cluster.create()
    attached = await cluster.attach(volume_id)
    assert attached == (["node-1"] if attach_required and publishes else [])
    await chain.stage(volume_id, mode=WRITER)
    if pod_info:
        vm = await cluster.publish(volume_id, "vm")
        assert chain.entry(vm) is not None, "a pod of a microVM gets the device"
        await chain.unpublish(volume_id, vm)
        plain = await cluster.publish(volume_id, "plain")
        assert chain.entry(plain) is None
        mount = mountinfo.at(plain)
        assert mount is not None
        assert mount.fs_type == "ext4"
        await chain.unpublish(volume_id, plain)
    else:
        words = "podInfoOnMount"
        await refused(cluster.publish(volume_id, "vm"), grpc.StatusCode.FAILED_PRECONDITION, words)
        assert chain.entry(chain.places.target("vm")) is None
    await chain.unstage(volume_id)
    if publishes:
        await chain.co.detach(volume_id, "node-1")

    client = kubernetes_api.client(settings.kubeconfig)
    served = ServedDriver(
        name=DRIVER, socket=chain.places.csi, backend=chain.places.shim, defer="runtime-class"
    )
    async with SocketPort(chain.places.csi) as port:
        found = await csi_driver_objects.of_driver(client, served, port)
    await client.close()
    said = {each.what.partition(" ")[0] for each in found}
    expected = set() if pod_info else {"podInfoOnMount"}
    if attach_required and not publishes:
        expected.add("attachRequired")
    assert said == expected
    await chain.co.delete(volume_id)
