"""`crust doctor`: the CSIDriver objects of the cluster against the settings."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from crust.blockdriver import serve
from crust.blockdriver.services.roles import Role
from crust.cli.doctor import csi_driver_objects
from crust.cli.doctor.node import Level, Node
from crust.core.deferral_keys import Defer
from crust.kubernetes_api import api as kubernetes_api
from crust.kubernetes_api.api import KubernetesApi
from crust.kubernetes_api.objects import CSIDriver
from crust.proxy.settings import ServedDriver
from crust.rpc.port import SocketPort
from tests.support.drivers import driver_state, fake_driver
from tests.support.drivers.fake_driver import FakeDriver
from tests.support.nodes import fake_kubernetes
from tests.support.nodes.examined_node import bad, found, write
from tests.support.nodes.fake_kubernetes import FakeKubernetes

NAME = "csi.example.com"


@contextmanager
def of_cluster(root: Path, api: FakeKubernetes, defer: str = "") -> Iterator[Node]:
    """A node whose settings name a driver, at csi.sock, and the API."""
    with fake_kubernetes.serving(api, root) as kubeconfig:
        driver = f'name = "{NAME}"\nsocket = "{root}/csi.sock"\nbackend = "/b.sock"\n{defer}\n'
        table = f'[kubernetes]\nkubeconfig = "{kubeconfig}"\nruntime_handlers = ["kata"]\n'
        write(root, "etc/crust/proxy.toml", f"[[drivers]]\n{driver}{table}")
        yield Node(root=root, csi_driver_mismatches=csi_driver_objects.mismatches)


@pytest.mark.parametrize(
    ("pod_info", "defer", "level"),
    [
        (True, "", Level.OK),
        (False, "", Level.WARNING),
        (False, 'defer = "runtime-class"', Level.ERROR),
    ],
)
async def test_csi_driver_object_is_compared_with_the_settings(
    root: Path, *, pod_info: bool, defer: str, level: Level
) -> None:
    """The real API over HTTP, and a driver at the socket that the kubelet calls."""
    api = FakeKubernetes()
    api.add_object("csidrivers", NAME, spec={"attachRequired": False, "podInfoOnMount": pod_info})
    driver = fake_driver.FakeDriver()
    with of_cluster(root, api, defer) as node:
        async with fake_driver.serving(driver, str(root / "csi.sock")):
            (result,) = await asyncio.to_thread(found, node, "csidriver")
    assert (result.level, NAME in result.what) == (level, True)


def test_cluster_is_not_asked_without_access_to_it(good: Node) -> None:
    assert (
        found(replace(good, csi_driver_mismatches=csi_driver_objects.mismatches), "csidriver") == ()
    )


def test_kubernetes_api_that_is_away_is_a_finding_of_doctor(root: Path) -> None:
    api = FakeKubernetes()
    api.faults.status = 500
    with of_cluster(root, api) as node:
        assert "Kubernetes API" in bad(node, "csidriver", Level.ERROR)


DISKS = "disks.example.com"
ATTACH_REQUIRED = pytest.mark.parametrize("attach_required", [True, False])


@pytest.fixture
def api() -> FakeKubernetes:
    return FakeKubernetes()


@pytest_asyncio.fixture
async def client(api: FakeKubernetes, tmp_path: Path) -> AsyncIterator[KubernetesApi]:
    with fake_kubernetes.serving(api, tmp_path) as kubeconfig:
        made = kubernetes_api.client(kubeconfig)
        yield made
        await made.close()


async def differing_fields(client: KubernetesApi, socket: str) -> set[str]:
    """Which fields of the object do not go with the driver."""
    served = ServedDriver(name=DISKS, socket=socket, backend=socket)
    async with SocketPort(socket) as driver:
        findings = await csi_driver_objects.of_driver(client, served, driver)
    assert not any(finding.level is Level.ERROR for finding in findings)
    return {finding.what.partition(" ")[0] for finding in findings}


@pytest.mark.parametrize(
    ("role", "attaches"),
    [
        (Role("node", is_shared=True), False),
        (Role("node"), True),
        (Role("all"), True),
        (Role("all", node_deployment=True), False),
    ],
)
@ATTACH_REQUIRED
async def test_attach_of_our_driver_is_compared_in_each_mode(
    client: KubernetesApi,
    api: FakeKubernetes,
    tmp_path: Path,
    *,
    role: Role,
    attaches: bool,
    attach_required: bool,
) -> None:
    spec = {"attachRequired": attach_required, "podInfoOnMount": True}
    api.add_object("csidrivers", DISKS, spec=spec)
    driver, socket = driver_state.built(tmp_path, role=role), str(tmp_path / "csi.sock")
    async with serve.running(driver, socket=socket, run_dir=str(tmp_path / "run")):
        differing = await differing_fields(client, socket)
    assert differing == (set() if attaches == attach_required else {"attachRequired"})


@ATTACH_REQUIRED
async def test_attach_that_driver_does_not_state_is_not_reported(
    client: KubernetesApi, api: FakeKubernetes, tmp_path: Path, *, attach_required: bool
) -> None:
    spec = {"attachRequired": attach_required, "podInfoOnMount": True}
    api.add_object("csidrivers", DISKS, spec=spec)
    socket = str(tmp_path / "csi.sock")
    async with fake_driver.serving(FakeDriver(), socket):
        assert await differing_fields(client, socket) == set()


POD_INFO, ATTACH, OURS = "podInfoOnMount", "attachRequired", "block.csi.crust.dev"
FATAL = {POD_INFO: True}


@pytest.mark.parametrize(
    ("name", "spec", "default", "attaches", "expected"),
    [
        (DISKS, {ATTACH: False}, None, False, {POD_INFO: False}),
        (DISKS, {ATTACH: False}, Defer.RUNTIME_CLASS, False, FATAL),
        (DISKS, {POD_INFO: True}, None, False, {ATTACH: False}),
        (DISKS, {ATTACH: True}, None, False, {POD_INFO: False, ATTACH: False}),
        (DISKS, {ATTACH: False, POD_INFO: True}, None, True, {ATTACH: False}),
        (OURS, {ATTACH: False, POD_INFO: True}, None, True, {}),
        (DISKS, {}, None, True, {POD_INFO: False}),
        (DISKS, None, None, True, {POD_INFO: False}),
        (DISKS, None, Defer.RUNTIME_CLASS, False, {POD_INFO: True, ATTACH: False}),
    ],
)
def test_object_that_does_not_go_with_the_settings_is_told(
    *,
    name: str,
    spec: dict[str, bool] | None,
    default: Defer | None,
    attaches: bool | None,
    expected: dict[str, bool],
) -> None:
    """The value says whether volumes do not get to their pods. Without an object Kubernetes has its defaults."""
    declared = None if spec is None else CSIDriver.model_validate({"spec": spec})
    found = csi_driver_objects.compare(name, declared, default=default, attaches=attaches)
    mismatches = list(found)
    errors = {
        mismatch.what.partition(" ")[0]: mismatch.level is Level.ERROR for mismatch in mismatches
    }
    assert errors == expected
    for mismatch in mismatches:
        assert name in mismatch.what
        assert "spec." in mismatch.todo
        assert ("no CSIDriver object" in mismatch.why) == (spec is None)
        assert ("every publish" in mismatch.why) == (mismatch.level is Level.ERROR)
