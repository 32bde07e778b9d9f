"""A driver of two pools behind its socket: each request reaches one of them, and one that is away closes no other."""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from crust.blockdriver import serve
from crust.blockdriver.controller.class_parameters import POOL
from crust.blockdriver.engines import pool_access
from crust.blockdriver.engines.files.pool import DirectoryPool
from crust.blockdriver.records.node_state import AttachSlots
from crust.blockdriver.services import identity
from crust.blockdriver.services.roles import Role
from crust.core import metrics
from crust.core.settings import OWN_DRIVER
from crust.rpc import channel
from crust.rpc.messages import extensions
from crust.rpc.serving.daemon import Daemon
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from crust.wire.v1 import pool_pb2, pool_pb2_grpc
from tests.support.co import Co, capability
from tests.support.drivers import driver_state
from tests.support.drivers.driver_state import NODE
from tests.support.drivers.memory_backend import MemoryBackend
from tests.support.faults.refusals import refused, repeated

Code = grpc.StatusCode
FAST = {POOL: "fast"}


@dataclass
class Served:
    """The driver's socket, and its process."""

    co: Co
    daemon: Daemon
    fast: Path

    async def pools(self) -> dict[str, pool_pb2.GetPoolResponse]:
        stub: pool_pb2_grpc.PoolAsyncStub = pool_pb2_grpc.PoolStub(self.co.channel)
        first = await stub.GetPool(pool_pb2.GetPoolRequest())
        return {pool.name: pool for pool in (first, *first.further)}

    async def until(self, *, is_open: bool) -> None:
        """The further pool's state, as the driver sees it."""
        async with asyncio.timeout(60):
            while bool((await self.pools())["fast"].problem) == is_open:  # noqa: ASYNC110 - only the answer tells
                await asyncio.sleep(0.05)

    async def take_away(self) -> None:
        self.fast.rename(self.fast.with_name("away"))
        await self.until(is_open=False)

    async def bring_back(self) -> None:
        self.fast.with_name("away").rename(self.fast)
        await self.until(is_open=True)


@asynccontextmanager
async def serving(root: Path, *, limit: int = 10, **options: Any) -> AsyncIterator[Served]:
    """A driver with the pools `default` and `fast`; the second one is away if its directory is."""
    slots = AttachSlots(NODE, limit)
    default, fast = (
        driver_state.built(root / name, pool_name=name, attach_slots=slots, **options)
        for name in ("default", "fast")
    )
    driver, socket = dataclasses.replace(default, further={"fast": fast}), f"{root}/csi.sock"
    async with (
        serve.running(driver, socket=socket, run_dir=f"{root}/run") as daemon,
        channel.connect(socket) as connected,
    ):
        yield Served(Co(connected), daemon, root / "fast" / "state")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("default", "fast"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.fixture
async def served(root: Path) -> AsyncIterator[Served]:
    async with serving(root) as running:
        yield running


async def test_class_chooses_pool_and_id_leads_to_it(served: Served, root: Path) -> None:
    co = served.co
    ids = [
        (await co.create("a", parameters=parameters)).volume_id
        for parameters in ({}, {POOL: "default"}, FAST)
    ]
    assert ids[0] == ids[1]
    assert ids[0].partition("-")[2] == ids[2].partition("-")[2]
    by_pool = {pool_access.pool_of(volume_id) for volume_id in ids}
    assert len(by_pool) == 2
    for name, volume_id in zip(("default", "fast"), ids[1:], strict=True):
        assert (root / name / "state" / "volumes" / volume_id).is_dir()
    assert set(await co.volumes()) == set(ids)
    await co.delete(ids[2])
    assert set(await co.volumes()) == {ids[0]}
    await refused(co.delete(f"{'0' * 16}-{'0' * 40}"), Code.NOT_FOUND, "IdOfOtherPool")


async def test_unknown_pool_has_no_capacity_and_is_refused(served: Served) -> None:
    elsewhere = {POOL: "slow"}
    created = served.co.create("a", parameters=elsewhere)
    await refused(created, Code.RESOURCE_EXHAUSTED, "PoolNotOnNode", "default, fast")
    assert await served.co.capacity(parameters=elsewhere) == 0
    assert await served.co.capacity(parameters=FAST) > 0


async def test_copies_and_groups_stay_within_one_pool(served: Served) -> None:
    co = served.co
    slow = (await co.create("a")).volume_id
    fast = (await co.create("a", parameters=FAST)).volume_id
    snapshot = (await co.snapshot(fast)).snapshot_id
    assert pool_access.pool_of(snapshot) == pool_access.pool_of(fast)
    for call in (
        co.create("copy", volume=fast),
        co.create("copy", snapshot=snapshot, parameters={POOL: "default"}),
        co.create("copy", volume=slow, parameters=FAST),
        co.group(slow, fast),
    ):
        await refused(call, Code.INVALID_ARGUMENT, "SeveralPools", "default, fast")
    for source in ({"volume": fast}, {"snapshot": snapshot}):
        copy = await co.create(f"of {source}", parameters=FAST, **source)
        assert pool_access.pool_of(copy.volume_id) == pool_access.pool_of(fast)
    group = await co.group(fast)
    assert pool_access.pool_of(group.group_snapshot_id) == pool_access.pool_of(fast)
    await co.delete_group(group)


async def test_capabilities_are_confirmed_for_own_pool_alone(served: Served) -> None:
    volume_id = (await served.co.create("a", parameters=FAST)).volume_id

    async def asked(pool: str) -> csi_pb2.ValidateVolumeCapabilitiesResponse:
        request = csi_pb2.ValidateVolumeCapabilitiesRequest(
            volume_id=volume_id, volume_capabilities=[capability()], parameters={POOL: pool}
        )
        return await served.co.controller.ValidateVolumeCapabilities(request)

    assert dict((await asked("fast")).confirmed.parameters) == FAST
    other = await asked("default")
    assert not other.HasField("confirmed")
    assert "pool fast" in other.message


@pytest.mark.parametrize("entries", [1, 2, 3, 4, 6, 7])
async def test_pages_of_volumes_go_over_all_pools(served: Served, entries: int) -> None:
    made = [
        (await served.co.create(name, parameters=parameters)).volume_id
        for parameters in ({}, FAST)
        for name in "abc"
    ]
    listed, token = list[str](), ""
    while True:
        request = csi_pb2.ListVolumesRequest(max_entries=entries, starting_token=token)
        page = await served.co.controller.ListVolumes(request)
        assert len(page.entries) <= entries
        listed += [entry.volume.volume_id for entry in page.entries]
        token = page.next_token
        if not token:
            break
    assert sorted(listed) == sorted(made)


async def test_lists_of_snapshots_and_health_have_all_pools(root: Path) -> None:
    async with serving(root, role=Role(csi_profile="1.13")) as served:
        co = served.co
        made = [(await co.create("a", parameters=each)).volume_id for each in ({}, FAST)]
        snapshots = [(await co.snapshot(volume_id)).snapshot_id for volume_id in made]
        assert sorted(await co.snapshots()) == sorted(snapshots)
        request = csi_pb2.ListSnapshotsRequest(source_volume_id=made[1])
        of_one = (await co.controller.ListSnapshots(request)).entries
        assert [entry.snapshot.snapshot_id for entry in of_one] == snapshots[1:]
        for entries in (1, 2, 0):
            first = await co.controller.ControllerListVolumeHealth(
                csi_pb2.ControllerListVolumeHealthRequest(max_entries=entries)
            )
            assert [entry.volume_id for entry in first.entries] == made[: entries or 2]
        await served.take_away()
        health = await co.node.NodeGetStorageHealth(csi_pb2.NodeGetStorageHealthRequest())
        (fault,) = health.backend_health
        assert fault.status == csi_pb2.STORAGE_UNREACHABLE
        assert f"pool of {OWN_DRIVER}/fast" in fault.message


async def test_pool_that_goes_away_closes_its_volumes_alone(served: Served) -> None:
    co = served.co
    slow, fast = [(await co.create("a", parameters=each)).volume_id for each in ({}, FAST)]
    await served.take_away()
    for call in (
        co.delete(fast),
        co.create("b", parameters=FAST),
        co.capacity(parameters=FAST),
        co.snapshot(fast),
        co.unpublish(fast, "/a"),
        co.volumes(),  # a volume that is not listed would be gone, to a CO
    ):
        await refused(call, Code.UNAVAILABLE, "PoolAbsent", "fast")
    assert await co.is_ready()
    assert (await co.create("b")).volume_id
    await co.delete(slow)
    assert (await co.node.NodeGetInfo(csi_pb2.NodeGetInfoRequest())).node_id == NODE
    assert f"pool of {OWN_DRIVER}/fast" in served.daemon.health.problems
    pools = await served.pools()
    assert pools["default"].size_bytes > 0
    assert pools["fast"].size_bytes == 0
    opened = [metrics.pool_open.labels(OWN_DRIVER + name)._value.get() for name in ("", "/fast")]
    assert opened == [1, 0]
    await served.bring_back()
    assert fast in await co.volumes()


async def test_driver_is_ready_while_one_pool_is_open(served: Served, root: Path) -> None:
    await served.take_away()
    metadata = ((extensions.KEY, extensions.ERROR_INFO),)
    probe = served.co.identity.Probe(csi_pb2.ProbeRequest(), metadata=metadata)
    assert (await probe).ready.value
    reason = dict(await probe.trailing_metadata())[extensions.NOT_READY]
    assert f"{served.fast}".encode() in reason
    (root / "default" / "state").rename(root / "default" / "away")
    async with asyncio.timeout(60):
        while await served.co.is_ready():  # noqa: ASYNC110 - a Probe is all that tells
            await asyncio.sleep(0.05)


async def test_ids_of_pool_that_was_never_open_are_not_absent(root: Path) -> None:
    async with serving(root) as served:
        fast = (await served.co.create("a", parameters=FAST)).volume_id
    (root / "fast" / "state").rename(root / "fast" / "away")
    (root / "fast" / "state").mkdir()
    async with serving(root) as served:
        for call in (served.co.delete(fast), served.co.unstage(fast, "/a")):
            await refused(call, Code.UNAVAILABLE, "PoolAbsent")
        assert (await served.co.create("b")).volume_id


async def test_pool_that_hangs_at_start_closes_no_other(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, find = threading.Event(), DirectoryPool.find

    def hanging(pool: DirectoryPool) -> None:
        if "/fast/" in pool.shown:
            answers.wait()
        find(pool)

    monkeypatch.setattr(DirectoryPool, "find", hanging)
    monkeypatch.setattr(serve, "OPENED_WITHIN_S", 0.01)
    async with serving(root) as served:
        try:
            created = served.co.create("a", parameters=FAST)
            await refused(created, Code.UNAVAILABLE, "PoolNotOpened", "being opened")
            await repeated(partial(served.co.create, "b"), Code.UNAVAILABLE)
        finally:
            answers.set()
        await served.until(is_open=True)
        assert (await served.co.create("a", parameters=FAST)).volume_id


async def test_pool_that_hangs_is_named_and_closes_no_other(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def hanging(pool: MemoryBackend) -> None:
        if "/fast/" in str(pool.directories.directory):
            answers.wait()

    monkeypatch.setattr(MemoryBackend, "check_usable", hanging)
    monkeypatch.setattr(identity, "_PROBE_TIMEOUT_S", 0.01)
    try:
        pools = await served.pools()
        assert "PoolNotResponding" in pools["fast"].problem
        named = {each.component: each.error_name for each in pools["default"].conditions}
        assert named[f"pool of {OWN_DRIVER}/fast"] == "PoolNotResponding"
    finally:
        answers.set()
    await served.until(is_open=True)


async def test_slots_of_node_are_those_of_all_pools(root: Path) -> None:
    async with serving(root, limit=1) as served:
        slow, fast = [
            (await served.co.create("a", parameters=each)).volume_id for each in ({}, FAST)
        ]
        await served.co.attach(slow, NODE)
        full = served.co.attach(fast, NODE)
        await refused(full, Code.RESOURCE_EXHAUSTED, "AttachLimitReached")
        await served.co.detach(slow, NODE)
        await served.co.attach(fast, NODE)


async def test_snapshots_of_two_pools_are_not_compared(served: Served) -> None:
    volume_ids = [(await served.co.create("a", parameters=each)).volume_id for each in ({}, FAST)]
    base, target = [(await served.co.snapshot(each)).snapshot_id for each in volume_ids]
    metadata = csi_pb2_grpc.SnapshotMetadataStub(served.co.channel)

    def delta(base: str, target: str) -> Awaitable[object]:
        request = csi_pb2.GetMetadataDeltaRequest(
            base_snapshot_id=base, target_snapshot_id=target, starting_offset=-1
        )
        return metadata.GetMetadataDelta(request).read()

    await refused(delta(base, target), Code.INVALID_ARGUMENT, "SeveralPools")
    await refused(delta(target, target), Code.OUT_OF_RANGE, "OffsetPastEnd")


async def test_volumes_for_operators_name_their_pool(served: Served) -> None:
    made = {
        (await served.co.create("a", parameters=each)).volume_id: name
        for name, each in (("default", {}), ("fast", FAST))
    }
    stub: pool_pb2_grpc.PoolAsyncStub = pool_pb2_grpc.PoolStub(served.co.channel)

    async def listed() -> dict[str, str]:
        rows = stub.ListPoolVolumes(pool_pb2.ListPoolVolumesRequest())
        return {row.volume_id: row.pool async for row in rows}

    assert await listed() == made
    await served.take_away()
    assert set((await listed()).values()) == {"default"}
