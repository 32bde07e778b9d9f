"""Drivers as the proxy asks and registers them; its own sockets: HandlerRegistry, Inspect, the Runtime API."""

import asyncio
import datetime
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from crust.blockdriver import serve
from crust.blockdriver.services.roles import Role
from crust.cli.doctor import csi_driver_objects
from crust.cli.doctor.finding import Level
from crust.core import volumes
from crust.core.deferral_keys import Defer
from crust.handoff import claims, layout
from crust.kubernetes_api import api as kubernetes_api
from crust.kubernetes_api.api import KubernetesApi
from crust.kubernetes_api.objects import CSIDriver
from crust.proxy import proxy_process as proxy
from crust.proxy.settings import ProxySettings, ServedDriver
from crust.rpc import channel
from crust.rpc.port import SocketPort
from crust.wire.pluginregistration.v1 import api_pb2, api_pb2_grpc
from crust.wire.v1 import inspect_pb2, inspect_pb2_grpc, runtime_pb2
from tests.support.co import capability
from tests.support.drivers import driver_state, fake_driver
from tests.support.drivers.fake_driver import FakeDriver
from tests.support.faults.refusals import refused
from tests.support.nodes import fake_kubernetes
from tests.support.nodes.fake_kubernetes import FakeKubernetes
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places

Code = grpc.StatusCode


@pytest.mark.spec("D-4")
async def test_driver_is_sent_the_flag_once_it_advertises_deferral(places: Places) -> None:
    """`backend` is one word of a settings file: a plain driver there would mount on the host at every publish."""
    driver = fake_driver.FakeDriver(defers=False)
    async with FakeNode(places, driver=driver, backend=places.driver) as node, node.handler():
        target = places.target("one")
        words = ("DEFER_FS_OPS", "crust shim")
        await refused(node.co.publish("vol-1", target), Code.UNIMPLEMENTED, *words)
        assert driver.called("NodePublishVolume") == []
        node.check_untouched(target)
        driver.defers = True  # on the same connection
        await node.co.publish("vol-1", target)
        node.check_published("vol-1", target)


async def test_capability_is_asked_once_per_connection(kata: FakeNode) -> None:
    for name in ("one", "two", "three"):
        await kata.co.publish(f"vol-{name}", kata.places.target(name))
    # once by the proxy, which the shim passes on, and once by the shim
    assert len(kata.driver.called("NodeGetCapabilities")) == 2


async def test_driver_downgraded_behind_its_socket_is_not_sent_flag(places: Places) -> None:
    """With a volume that a guest has written, the host's kernel would have parsed a hostile filesystem."""
    old, new = fake_driver.FakeDriver(), fake_driver.FakeDriver(defers=False)
    async with FakeNode(places, driver=old) as node, node.handler():
        await node.co.publish("vol-1", places.target("one"))
        await node.enter("driver", fake_driver.serving(new, places.driver))
        publish = node.co.publish("vol-2", places.target("two"), timeout_s=30)
        await refused(publish, Code.UNIMPLEMENTED, "DEFER_FS_OPS")
    assert new.called("NodePublishVolume") == []


async def test_driver_of_another_name_is_refused(kata: FakeNode, target: str) -> None:
    kata.driver.name = "other.example.com"
    await refused(
        kata.co.publish("vol-1", target),
        Code.FAILED_PRECONDITION,
        "'other.example.com'",
        "settings",
    )
    kata.check_untouched(target)


async def test_ids_of_512_bytes_are_deferred_asked_about_and_unpublished(kata: FakeNode) -> None:
    """azuredisk's have up to 250; CSI says 128 and no CO checks."""
    target, volume_id = kata.places.target("one"), "/seg" * 128
    await kata.co.publish(volume_id, target)
    kata.check_published(volume_id, target)
    with kata.sandbox(target):
        assert (await kata.co.stats(volume_id, target)).usage
    await kata.co.unpublish(volume_id, target)
    kata.check_untouched(target)


async def test_options_that_the_driver_does_not_repeat_reach_the_record(
    kata: FakeNode, target: str
) -> None:
    kata.driver.alter = lambda answer: answer.ClearField("mount_options")
    given = capability(mount_flags=["nosuid,noexec", "dirsync", "_netdev"])
    await kata.co.publish("vol-1", target, given)
    assert kata.record(target).mount.mount_options == ("nosuid", "noexec", "dirsync")


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


async def differing_fields(client: KubernetesApi, socket: str) -> set[str]:
    """Which fields of the object do not go with the driver."""
    served = ServedDriver(name=NAME, socket=socket, backend=socket)
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
    api.add_object("csidrivers", NAME, spec=spec)
    driver, socket = driver_state.built(tmp_path, role=role), str(tmp_path / "csi.sock")
    async with serve.running(driver, socket=socket, run_dir=str(tmp_path / "run")):
        differing = await differing_fields(client, socket)
    assert differing == (set() if attaches == attach_required else {"attachRequired"})


@ATTACH_REQUIRED
async def test_attach_that_driver_does_not_state_is_not_reported(
    client: KubernetesApi, api: FakeKubernetes, tmp_path: Path, *, attach_required: bool
) -> None:
    spec = {"attachRequired": attach_required, "podInfoOnMount": True}
    api.add_object("csidrivers", NAME, spec=spec)
    socket = str(tmp_path / "csi.sock")
    async with fake_driver.serving(FakeDriver(), socket):
        assert await differing_fields(client, socket) == set()


POD_INFO, ATTACH, OURS = "podInfoOnMount", "attachRequired", "block.csi.crust.dev"
FATAL = {POD_INFO: True}


@pytest.mark.parametrize(
    ("name", "spec", "default", "attaches", "expected"),
    [
        (NAME, {ATTACH: False}, None, False, {POD_INFO: False}),
        (NAME, {ATTACH: False}, Defer.RUNTIME_CLASS, False, FATAL),
        (NAME, {POD_INFO: True}, None, False, {ATTACH: False}),
        (NAME, {ATTACH: True}, None, False, {POD_INFO: False, ATTACH: False}),
        (NAME, {ATTACH: False, POD_INFO: True}, None, True, {ATTACH: False}),
        (OURS, {ATTACH: False, POD_INFO: True}, None, True, {}),
        (NAME, {}, None, True, {POD_INFO: False}),
        (NAME, None, None, True, {POD_INFO: False}),
        (NAME, None, Defer.RUNTIME_CLASS, False, {POD_INFO: True, ATTACH: False}),
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
    mismatches = csi_driver_objects.compare(name, declared, default=default, attaches=attaches)
    errors = {
        mismatch.what.partition(" ")[0]: mismatch.level is Level.ERROR for mismatch in mismatches
    }
    assert errors == expected
    for mismatch in mismatches:
        assert name in mismatch.what
        assert "spec." in mismatch.todo
        assert ("no CSIDriver object" in mismatch.why) == (spec is None)
        assert ("every publish" in mismatch.why) == (mismatch.level is Level.ERROR)


REGISTERED = "one.example.com"


@asynccontextmanager
async def running(places: Places, **changes: object) -> AsyncIterator[None]:
    """A proxy with one driver, whose table has `changes`, and a kubelet's directory of registrations."""
    served = {"name": REGISTERED, "socket": f"{places.root}/one.sock", "backend": places.driver}
    node = FakeNode(places)
    settings = ProxySettings.model_validate(
        node.proxy_settings().model_dump()
        | {"drivers": (served | changes,), "plugins_registry": f"{places.root}/registry"}
    )
    async with node.part("driver"), proxy.running(settings, host=node.host):
        yield


async def inspect(places: Places) -> tuple[list[str], list[str]]:
    """Names of the drivers with their registration, and the error names of the proxy's conditions."""
    async with channel.connect(places.sockets.inspect) as connected:
        stub: inspect_pb2_grpc.InspectAsyncStub = inspect_pb2_grpc.InspectStub(connected)
        drivers = (await stub.ListDrivers(inspect_pb2.ListDriversRequest())).drivers
        conditions = (await stub.GetHealth(inspect_pb2.GetHealthRequest())).conditions
    return (
        [f"{driver.name} {driver.registration}" for driver in drivers],
        [condition.error_name for condition in conditions],
    )


async def test_kubelet_finds_a_driver_and_may_refuse_it(places: Places) -> None:
    async with (
        running(places),
        channel.connect(f"{places.root}/registry/{REGISTERED}-reg.sock") as connected,
    ):
        kubelet: api_pb2_grpc.RegistrationAsyncStub = api_pb2_grpc.RegistrationStub(connected)
        info = await kubelet.GetInfo(api_pb2.InfoRequest(), timeout=10)
        assert info == api_pb2.PluginInfo(
            type="CSIPlugin",
            name=REGISTERED,
            endpoint=f"{places.root}/one.sock",
            supported_versions=["1.0.0"],
        )
        refused = api_pb2.RegistrationStatus(plugin_registered=False, error="no node id")
        await kubelet.NotifyRegistrationStatus(refused, timeout=10)
        assert await inspect(places) == ([f"{REGISTERED} refused"], ["RegistrationRefused"])
        taken = api_pb2.RegistrationStatus(plugin_registered=True)
        await kubelet.NotifyRegistrationStatus(taken, timeout=10)
        assert await inspect(places) == ([f"{REGISTERED} registered"], [])
    assert os.listdir(f"{places.root}/registry") == []


async def test_driver_that_others_register_has_no_registration_socket(places: Places) -> None:
    async with running(places, register_plugin=False):
        assert await inspect(places) == ([f"{REGISTERED} "], [])
        assert not os.path.exists(f"{places.root}/registry")


async def test_operators_see_drivers_handlers_and_volumes(kata: FakeNode, published: str) -> None:
    (driver,) = (await kata.inspect.ListDrivers(inspect_pb2.ListDriversRequest())).drivers
    assert (driver.name, driver.connected, driver.deferred_volumes) == ("csi.example.com", True, 1)
    (handler,) = (await kata.inspect.ListHandlers(inspect_pb2.ListHandlersRequest())).handlers
    assert handler.registration.name == "kata"
    volume = await _listed(kata)
    assert (volume.volume_id, volume.state, volume.sandbox_id) == ("vol-1", "published", "")
    with kata.sandbox(published, name="box-7"):
        volume = await _listed(kata)
        assert (volume.state, volume.sandbox_id) == ("mounted", "box-7")


async def _listed(node: FakeNode) -> inspect_pb2.DeferredVolume:
    """The one deferred volume, after a look."""
    request = inspect_pb2.ListDeferredVolumesRequest()
    (volume,) = (await node.inspect.ListDeferredVolumes(request, timeout=10)).volumes
    return volume


async def test_error_of_the_last_claim_stays_visible(kata: FakeNode, published: str) -> None:
    """When an operator looks at a pod that does not start, its sandbox has ended already."""
    parsed = volumes.TargetPath.parse(published)
    paths = layout.Layout(kata.places.volumes).entry(parsed)
    with claims.ClaimLock.acquire(paths, parsed):
        claims.write(
            paths,
            claims.Claim(
                sandbox_id="box-7",
                handler="kata",
                state=claims.State.ERROR,
                error="the guest cannot mount it",
                pid=os.getpid(),
                claimed_at=datetime.datetime.now(datetime.UTC),
                live=True,
            ),
        )
    volume = await _listed(kata)
    assert (volume.state, volume.sandbox_id) == ("published", "")
    assert volume.message == "the guest cannot mount it"


async def test_claim_that_a_killed_sandbox_left_is_called_so(
    kata: FakeNode, published: str
) -> None:
    with kata.sandbox(published, name="box-7"):
        claim = Path(layout.Layout(kata.places.volumes).entry(volumes.TargetPath(published)).claim)
        left = claim.read_bytes()
    claim.write_bytes(left)
    volume = await _listed(kata)
    assert (volume.state, volume.sandbox_id) == ("published", "")
    assert volume.message.startswith("sandbox box-7 ended and left its claim")


async def test_unreadable_entry_is_shown_with_its_reason(node: FakeNode) -> None:
    entry = Path(node.places.volumes, "a" * 64)
    entry.mkdir(0o700)
    (entry / "mountInfo.json").write_text("{}")
    volume = await _listed(node)
    assert volume.state == "unreadable"
    assert "cannot be read" in volume.message


async def test_watch_reports_the_events_of_a_volume(kata: FakeNode, target: str) -> None:
    watch: Any = kata.inspect.Watch(inspect_pb2.WatchRequest(), timeout=30)
    await watch.initial_metadata()  # the watch has begun
    await kata.co.publish("vol-1", target)
    assert (await _next(watch, "published")).target_path == target
    with kata.sandbox(target, name="box-7"):
        assert "box-7" in (await _next(watch, "claimed")).message
        await kata.freeze(target, 5)
        frozen = await _next(watch, "frozen")
        assert (frozen.target_path, frozen.message) == (target, "for 5 s at most")
        await kata.thaw(target)
        assert (await _next(watch, "thawed")).target_path == target
        await kata.limit(target, volumes.IoLimits(read_iops=1))
        assert "read_iops=1" in (await _next(watch, "limits-set")).message
    await _next(watch, "released")
    await kata.co.unpublish("vol-1", target)
    assert (await _next(watch, "unpublished")).handler == "kata"
    refusal = kata.co.publish("vol-1", target, capability("btrfs"))
    await refused(refusal, Code.FAILED_PRECONDITION)
    assert "btrfs" in (await _next(watch, "refused")).message
    watch.cancel()


async def _next(watch: Any, kind: str) -> inspect_pb2.Event:
    """The next event of a kind; a claim causes two events, taken and mounted."""
    async with asyncio.timeout(60):
        while True:
            event: inspect_pb2.Event = await watch.read()
            if event.kind == kind:
                return event


@pytest.mark.parametrize("method", ["RuntimeStageVolume", "RuntimeUnstageVolume"])
async def test_staging_of_the_kep_is_unimplemented(
    kata: FakeNode, published: str, method: str
) -> None:
    request = getattr(runtime_pb2, f"{method}Request")(volume_target_path=published)
    await refused(
        getattr(kata.runtime, method)(request, timeout=10), Code.UNIMPLEMENTED, method, "not served"
    )
    kata.check_published("vol-1", published)
