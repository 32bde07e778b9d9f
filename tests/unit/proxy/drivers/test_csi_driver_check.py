"""The CSIDriver object of a driver whose controller runs elsewhere: the driver at the node says what that does."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from crust.blockdriver import app, serve
from crust.blockdriver.services.roles import Role
from crust.core.settings.proxy import ServedDriver
from crust.kubernetes_api import api as kubernetes_api
from crust.kubernetes_api.api import KubernetesApi
from crust.proxy.drivers import csi_driver_check
from crust.rpc.port import SocketPort
from tests.support.drivers import fake_driver, memory_backend
from tests.support.drivers.fake_driver import FakeDriver
from tests.support.drivers.memory_backend import MemoryBackend
from tests.support.nodes import fake_kubernetes
from tests.support.nodes.fake_kubernetes import FakeKubernetes
from tests.support.nodes.fake_throttle import FakeThrottle

NAME = "disks.example.com"
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


async def said(client: KubernetesApi, socket: str) -> set[str]:
    """Which fields of the object do not go with the driver."""
    served = ServedDriver(name=NAME, socket=socket, backend=socket)
    async with SocketPort(socket) as driver:
        found = await csi_driver_check.mismatches(client, served, driver)
    assert not any(each.is_fatal for each in found)
    return {each.what.partition(" ")[0] for each in found}


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
    api.add_object("csidrivers", NAME, spec=spec)
    (tmp_path / "state").mkdir()
    driver = app.build(
        engine=memory_backend.engine(str(tmp_path / "state"), MemoryBackend()),
        run_dir=str(tmp_path / "run"),
        node_id="node-1",
        target_roots=(str(tmp_path),),
        throttle=FakeThrottle(obstacle="nothing here limits devices"),
        role=role,
    )
    socket = str(tmp_path / "csi.sock")
    async with serve.running(driver, socket=socket, run_dir=str(tmp_path / "run")):
        found = await said(client, socket)
    assert found == (set() if attaches == attach_required else {"attachRequired"})


@ATTACH_REQUIRED
async def test_attach_of_a_driver_that_does_not_state_it_is_not_reported(
    client: KubernetesApi, api: FakeKubernetes, tmp_path: Path, *, attach_required: bool
) -> None:
    spec = {"attachRequired": attach_required, "podInfoOnMount": True}
    api.add_object("csidrivers", NAME, spec=spec)
    socket = str(tmp_path / "csi.sock")
    async with fake_driver.serving(FakeDriver(), socket):
        assert await said(client, socket) == set()
