"""What a driver serves by its mode, over its socket; and while its engine hangs: bounded threads, a typed answer."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from crust.blockdriver import serve
from crust.blockdriver.driver import Driver
from crust.blockdriver.engines.pool_access import Attachment
from crust.blockdriver.services import identity
from crust.blockdriver.services.identity import Identity
from crust.blockdriver.services.roles import Role
from crust.core import errors, operations, volumes
from crust.core.operations import KeyedOperations, SystemCallTimedOut
from crust.host.process import syscalls, workers
from crust.host.process.workers import NoWorkerFree, Workers
from crust.rpc import channel, status
from crust.rpc.call import Call
from crust.rpc.messages import extensions
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support.co import Co, create_request
from tests.support.drivers import driver_state
from tests.support.drivers.block_driver import caller
from tests.support.drivers.memory_backend import MemoryBackend
from tests.support.faults.refusals import refused
from tests.support.raised import raised

UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
_Rpc = csi_pb2.ControllerServiceCapability.RPC
_Service = csi_pb2.PluginCapability.Service
Serve = Callable[[Role], AbstractAsyncContextManager[Co]]


@pytest.fixture
def served(tmp_path: Path) -> Serve:
    @asynccontextmanager
    async def serving(role: Role) -> AsyncIterator[Co]:
        driver, socket = driver_state.built(tmp_path, role=role), str(tmp_path / "csi.sock")
        async with (
            serve.running(driver, socket=socket, run_dir=str(tmp_path / "run")),
            channel.connect(socket) as connected,
        ):
            yield Co(connected)

    return serving


async def services(co: Co) -> set[int]:
    answer = await co.identity.GetPluginCapabilities(csi_pb2.GetPluginCapabilitiesRequest())
    return {
        capability.service.type
        for capability in answer.capabilities
        if capability.HasField("service")
    }


async def test_node_serves_no_rpc_of_a_controller_and_reports_none(served: Serve) -> None:
    async with served(Role("node")) as co:
        asked = csi_pb2.ControllerGetCapabilitiesRequest()
        capabilities = co.controller.ControllerGetCapabilities(asked)
        await refused(capabilities, UNIMPLEMENTED, "runs in mode node")
        await refused(co.create(), UNIMPLEMENTED, "NotServedInMode")
        await refused(co.group("v"), UNIMPLEMENTED)
        metadata = csi_pb2_grpc.SnapshotMetadataStub(co.channel)
        listed = metadata.GetMetadataAllocated(csi_pb2.GetMetadataAllocatedRequest())
        await refused(listed.read(), UNIMPLEMENTED)
        assert await services(co) == {_Service.VOLUME_ACCESSIBILITY_CONSTRAINTS}
        assert (await co.node.NodeGetInfo(csi_pb2.NodeGetInfoRequest())).node_id == "node-1"


async def test_controller_serves_no_rpc_of_a_node(served: Serve, tmp_path: Path) -> None:
    async with served(Role("controller")) as co:
        info = co.node.NodeGetInfo(csi_pb2.NodeGetInfoRequest())
        await refused(info, UNIMPLEMENTED, "mode controller")
        capabilities = co.node.NodeGetCapabilities(csi_pb2.NodeGetCapabilitiesRequest())
        await refused(capabilities, UNIMPLEMENTED)
        assert (await co.create()).volume_id
        assert _Service.CONTROLLER_SERVICE in await services(co)
    assert not (tmp_path / "run" / syscalls.boot_id()).exists()


async def test_node_deployment_serves_nothing_that_any_node_may_get(served: Serve) -> None:
    async with served(Role("all", node_deployment=True)) as co:
        answer = await co.controller.ControllerGetCapabilities(
            csi_pb2.ControllerGetCapabilitiesRequest(),
            metadata=(("crust-extensions", "deferral,node-info"),),
        )
        advertised = {capability.rpc.type for capability in answer.capabilities}
        assert {_Rpc.CREATE_DELETE_VOLUME, _Rpc.GET_CAPACITY, _Rpc.CREATE_DELETE_SNAPSHOT} <= (
            advertised
        )
        assert not advertised & {
            _Rpc.EXPAND_VOLUME,
            _Rpc.MODIFY_VOLUME,
            _Rpc.PUBLISH_UNPUBLISH_VOLUME,
            _Rpc.PUBLISH_READONLY,
            _Rpc.LIST_VOLUMES_PUBLISHED_NODES,
            _Rpc.GET_NODE_INFO,
        }
        made = await co.create()
        for call in (
            co.attach(made.volume_id, "node-1"),
            co.grow(made.volume_id, 0),
            co.modify(made.volume_id),
        ):
            await refused(call, UNIMPLEMENTED, "node_deployment")
        capacity = csi_pb2.GetCapacityRequest(accessible_topology=made.accessible_topology[0])
        answered = await co.controller.GetCapacity(capacity)
        assert answered.available_capacity > 0
        assert answered.HasField("maximum_volume_size")
        elsewhere = csi_pb2.Topology(segments={"crust.dev/node": "node-2"})
        assert await co.capacity(accessible_topology=elsewhere) == 0


# Probe reports in time whether the driver can serve, whatever its volumes do.


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy is no pool that hangs."""
    monkeypatch.setattr(identity, "_PROBE_TIMEOUT_S", 30)
    monkeypatch.setattr(workers, "FREE_WITHIN_S", 30)


class Checked(MemoryBackend):
    """A backend with a check of one's own."""

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self._check = check

    def check_usable(self) -> None:
        self._check()


def identity_of(check: Callable[[], None]) -> Identity:
    return Identity("driver", Checked(check), Role(), KeyedOperations(Workers("the driver")))


async def ready(served: Identity) -> bool:
    return (await served.Probe(csi_pb2.ProbeRequest(), caller())).ready.value


async def test_probe_of_a_hung_pool_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_PROBE_TIMEOUT_S", 0.01)
    dead = threading.Event()
    served = identity_of(lambda: discard(dead.wait()))
    for _ in range(2):
        with raised("PoolNotResponding"):
            await ready(served)
    dead.set()
    monkeypatch.setattr(identity, "_PROBE_TIMEOUT_S", 30)
    assert await ready(served)


async def test_probe_of_a_missing_pool_reports_the_reason() -> None:
    def refuse() -> None:
        raise errors.NotReady("no loop driver")

    with pytest.raises(errors.NotReady, match="no loop driver"):
        await ready(identity_of(refuse))


def discard(_: object) -> None:
    return None


@pytest.mark.parametrize("stays", [True, False])
async def test_probe_of_a_pool_that_goes_away_is_not_ready(*, stays: bool) -> None:
    def gone() -> None:
        plugin.is_ready = stays
        raise errors.PeerUnavailable("the directory is not open")

    plugin = identity_of(gone)
    if stays:
        with pytest.raises(errors.PeerUnavailable):
            await ready(plugin)
    else:
        assert not await ready(plugin)


@pytest.mark.parametrize("asks", [True, False])
async def test_probe_of_an_absent_pool_gives_the_reason(*, asks: bool) -> None:
    def absent() -> None:
        raise errors.PeerUnavailable.named("PoolAbsent", "the disk is not mounted")

    plugin = identity_of(absent)
    plugin.is_ready = False
    metadata = ((extensions.KEY, extensions.ERROR_INFO),) * asks
    call = Call("/csi.v1.Identity/Probe", metadata)
    assert not (await plugin.Probe(csi_pb2.ProbeRequest(), call)).ready.value
    wanted = ((extensions.NOT_READY, b"[PoolAbsent] the disk is not mounted"),)
    assert call.trailing == (wanted if asks else ())


_SOON_S = 0.01
_THREADS = 4


class HangingBackend(MemoryBackend):
    """A backend whose calls hang for the volumes in `dead`, until `released`."""

    def __init__(self) -> None:
        super().__init__()
        self.dead: set[volumes.VolumeId] = set()
        self.released = threading.Event()
        self.hung: Counter[str] = Counter()
        self.more = threading.Condition()

    def attached(self, volume_id: volumes.VolumeId) -> Attachment | None:
        self._hang(volume_id)
        return super().attached(volume_id)

    def image_problem(self, volume_id: volumes.VolumeId, size_bytes: int) -> str:
        self._hang(volume_id)
        return super().image_problem(volume_id, size_bytes)

    def wait_for(self, hung: int) -> None:
        """Until so many calls hang. Blocks."""
        with self.more:
            self.more.wait_for(lambda: self.hung.total() >= hung)

    def _hang(self, volume_id: volumes.VolumeId) -> None:
        if volume_id not in self.dead:
            return
        with self.more:
            self.hung[volume_id] += 1
            self.more.notify_all()
        self.released.wait()


@pytest.fixture
def backend() -> Iterator[HangingBackend]:
    engine = HangingBackend()
    yield engine
    engine.released.set()


@pytest.fixture
def driver(tmp_path: Path, backend: HangingBackend) -> Driver:
    threads = Workers("the driver", limit=_THREADS)
    return driver_state.opened(tmp_path, backend=backend, threads=threads)


async def create(driver: Driver, name: str) -> volumes.VolumeId:
    made = await driver.controller.CreateVolume(create_request(name), caller())
    return volumes.VolumeId(made.volume.volume_id)


async def unstage(driver: Driver, volume_id: str, *, left_s: float | None = None) -> None:
    request = csi_pb2.NodeUnstageVolumeRequest(volume_id=volume_id, staging_target_path="/staging")
    await driver.node.NodeUnstageVolume(request, caller("NodeUnstageVolume", left_s=left_s))


async def hang(
    driver: Driver, backend: HangingBackend, count: int, name: str = "dead"
) -> tuple[list[volumes.VolumeId], list[asyncio.Task[None]]]:
    """Volumes whose unstage hangs, each on a thread."""
    dead = [await create(driver, f"{name}-{number}") for number in range(count)]
    before = len(backend.dead)
    backend.dead.update(dead)
    calls = [asyncio.create_task(unstage(driver, volume_id)) for volume_id in dead]
    await asyncio.to_thread(backend.wait_for, before + count)
    return dead, calls


async def probe(driver: Driver) -> bool:
    return (await driver.identity.Probe(csi_pb2.ProbeRequest(), caller())).ready.value


async def test_unstage_that_hangs_takes_one_thread(driver: Driver, backend: HangingBackend) -> None:
    (dead,), (call,) = await hang(driver, backend, 1)
    for _ in range(3 * _THREADS):
        with pytest.raises(operations.OperationOverdue) as caught:
            await unstage(driver, dead, left_s=_SOON_S)
        assert status.branch_of(type(caught.value)) is errors.OperationPending
    assert backend.hung == {dead: 1}
    assert await probe(driver)
    backend.released.set()
    await call


async def test_second_call_beside_one_is_refused(driver: Driver, backend: HangingBackend) -> None:
    (dead,), (call,) = await hang(driver, backend, 1)
    with pytest.raises(operations.OperationInProgress, match="NodeUnstageVolume"):
        await driver.controller.DeleteVolume(csi_pb2.DeleteVolumeRequest(volume_id=dead), caller())
    backend.released.set()
    await call


async def test_engine_whose_threads_hang_refuses_work_and_fails_probe(
    driver: Driver, backend: HangingBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = await create(driver, "healthy")
    _, calls = await hang(driver, backend, _THREADS - 1)
    await unstage(driver, healthy)
    calls += (await hang(driver, backend, 1, "last"))[1]
    monkeypatch.setattr(workers, "FREE_WITHIN_S", _SOON_S)
    with pytest.raises(NoWorkerFree, match=f"none of its {_THREADS} threads .* kernel log"):
        await unstage(driver, healthy)
    for call in (
        probe(driver),
        driver.controller.GetCapacity(csi_pb2.GetCapacityRequest(), caller()),
    ):
        with pytest.raises(NoWorkerFree):
            await call
    monkeypatch.setattr(workers, "FREE_WITHIN_S", 30)
    backend.released.set()
    await asyncio.gather(*calls)
    await unstage(driver, healthy)
    assert await probe(driver)


async def test_read_that_hangs_takes_one_thread(driver: Driver, backend: HangingBackend) -> None:
    dead, healthy = await create(driver, "dead"), await create(driver, "healthy")
    backend.dead.add(dead)
    get, listing = csi_pb2.ControllerGetVolumeRequest, csi_pb2.ListVolumesRequest()
    for _ in range(10):
        with pytest.raises(SystemCallTimedOut, match="ControllerGetVolume does not answer"):
            await driver.controller.ControllerGetVolume(
                get(volume_id=dead), caller("ControllerGetVolume", left_s=_SOON_S)
            )
        with pytest.raises(SystemCallTimedOut, match="ListVolumes does not answer"):
            await driver.controller.ListVolumes(listing, caller("ListVolumes", left_s=_SOON_S))
    await asyncio.to_thread(backend.wait_for, 2)
    assert backend.hung == {dead: 2}
    answer = await driver.controller.ControllerGetVolume(get(volume_id=healthy), caller())
    assert answer.volume.volume_id == healthy
    assert await probe(driver)
