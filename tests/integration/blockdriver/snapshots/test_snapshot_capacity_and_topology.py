"""Capacity for a snapshot's copy, topology of snapshots, and snapshot records that cannot be read."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from crust.blockdriver.controller import topology
from crust.blockdriver.engines import protocol
from crust.blockdriver.engines.files.provisioning import FileTaking
from crust.blockdriver.records import models
from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers.block_driver import MIB, Bench, caller
from tests.support.drivers.pools import bench_on
from tests.support.raised import raised
from tests.support.records import pool_layout
from tests.support.records.copies import down, group, in_use, snapshot, up, write

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]


@pytest.fixture(params=["ext4", "xfs"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    with bench_on(request.param, tmp_path, size=512 * MIB) as bench:
        yield bench


async def available(bench: Bench) -> int:
    answer = await bench.driver.controller.GetCapacity(csi_pb2.GetCapacityRequest(), caller())
    return answer.available_capacity


async def filled(bench: Bench, *, leave: int) -> tuple[str, str]:
    """A volume with 64 MiB of data, mounted, in a pool with all but `leave` bytes provisioned."""
    source, target = await in_use(bench, "source", size=128 * MIB)
    write(target, "file", b"x" * 64 * MIB)
    await down(bench, source)
    await bench.create("other", size=await available(bench) - leave)
    return source, await up(bench, source)


async def test_snapshot_does_not_use_reserved_capacity(small: Bench) -> None:
    volume_id, _ = await filled(small, leave=16 * MIB)
    if small.driver.stores.provisioning.copies_at_once():
        await snapshot(small, volume_id)
    else:
        with raised("OutOfCapacity"):
            await snapshot(small, volume_id)
        with raised("OutOfCapacity"):
            await group(small, volume_id)
        folders = ("state/snapshots", "run/freezes")
        assert [path for each in folders for path in (small.root / each).iterdir()] == []
    await down(small, volume_id)


async def test_capacity_is_reserved_before_a_copy_starts(
    small: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume_id, _ = await filled(small, leave=100 * MIB)
    backend = small.driver.stores.provisioning
    take, before = FileTaking.take, await available(small)
    meanwhile: list[int] = []

    def looking(self: FileTaking, image: protocol.Image) -> None:
        meanwhile.append(small.driver.stores.capacity.available_bytes())
        take(self, image)

    monkeypatch.setattr(FileTaking, "take", looking)
    await snapshot(small, volume_id)
    copied = 0 if backend.copies_at_once() else 64 * MIB
    assert before - meanwhile[0] >= copied
    assert (before - meanwhile[0] < MIB * 8) == (copied == 0)
    after = await available(small)
    assert before - after >= copied, "what was copied is no longer free"
    await down(small, volume_id)


async def test_snapshot_in_csi_1_13_has_its_topology(tmp_path: Path) -> None:
    types = csi_pb2.PluginCapability.Service
    for profile in ("1.12", "1.13"):
        root = tmp_path / profile
        root.mkdir()
        bench = Bench(root, profile="1.13" if profile == "1.13" else "1.12")
        reported = await bench.driver.identity.GetPluginCapabilities(
            csi_pb2.GetPluginCapabilitiesRequest(), caller()
        )
        services = {each.service.type for each in reported.capabilities}
        assert (types.SNAPSHOT_ACCESSIBILITY_CONSTRAINTS in services) == (profile == "1.13")
        source = await bench.create("source")
        taken = await snapshot(bench, source.volume_id)
        members = (await group(bench, source.volume_id)).snapshots
        looked = await bench.driver.controller.GetSnapshot(
            csi_pb2.GetSnapshotRequest(snapshot_id=taken.snapshot_id), caller()
        )
        listed = await bench.driver.controller.ListSnapshots(
            csi_pb2.ListSnapshotsRequest(), caller()
        )
        every = [taken, *members, looked.snapshot, *(each.snapshot for each in listed.entries)]
        here = [{topology.KEY: topology.value_of("node-1")}] if profile == "1.13" else []
        for each in every:
            assert [dict(place.segments) for place in each.accessible_topology] == here


async def test_snapshot_required_in_another_topology_is_refused(bench: Bench) -> None:
    source = await bench.create("source")
    request = csi_pb2.CreateSnapshotRequest(source_volume_id=source.volume_id, name="s")
    request.accessibility_requirements.requisite.add(segments={topology.KEY: "node-2"})
    create = bench.driver.controller.CreateSnapshot
    with pytest.raises(topology.TopologyNotAccessible, match="no snapshot"):
        await create(request, caller())
    request.accessibility_requirements.requisite.add(segments={topology.KEY: "node-1"})
    assert (await create(request, caller())).snapshot.ready_to_use


async def test_unreadable_snapshot_record_is_reported_and_kept(tmp_path: Path) -> None:
    bench = Bench(tmp_path, profile="1.13")
    source = await bench.create("source")
    taken = await snapshot(bench, source.volume_id)
    made = await group(bench, source.volume_id)
    state = tmp_path / "state"
    ids = (taken.snapshot_id, made.group_snapshot_id)
    damaged = [pool_layout.snapshot_set(state, each) for each in ids]
    for path in damaged:
        path.write_bytes(b"{}")
    bench.restart()
    health = await bench.driver.node.NodeGetStorageHealth(
        csi_pb2.NodeGetStorageHealthRequest(), caller()
    )
    assert [each.reason for each in health.backend_health] == ["SnapshotRecordUnreadable"] * 2
    assert {each.status for each in health.backend_health} == {csi_pb2.STORAGE_DEGRADED}
    for call in (
        bench.driver.controller.ListSnapshots(
            csi_pb2.ListSnapshotsRequest(snapshot_id=taken.snapshot_id), caller()
        ),
        bench.driver.controller.GetSnapshot(
            csi_pb2.GetSnapshotRequest(snapshot_id=taken.snapshot_id), caller()
        ),
        bench.driver.controller.DeleteSnapshot(
            csi_pb2.DeleteSnapshotRequest(snapshot_id=taken.snapshot_id), caller()
        ),
        snapshot(bench, source.volume_id),
        group(bench, source.volume_id),
    ):
        with pytest.raises(models.RecordUnreadable):
            await call
    assert [path.read_bytes() for path in damaged] == [b"{}"] * 2
    kept = {each.snapshot_id for each in (taken, *made.snapshots)}
    assert pool_layout.snapshot_images(state) == kept


async def test_snapshot_or_image_without_the_other_is_reported_and_kept(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, profile="1.13")
    source = await bench.create("source")
    kept, lost = (
        await snapshot(bench, source.volume_id),
        await snapshot(bench, source.volume_id, "b"),
    )
    await group(bench, source.volume_id)
    pool = tmp_path / "state"
    orphan = pool_layout.snapshot_image(pool, bench.ids.snapshot_id("nobody"))
    orphan.parent.mkdir()
    pool_layout.snapshot_image(pool, lost.snapshot_id).rename(orphan)
    bench.restart()
    health = await bench.driver.node.NodeGetStorageHealth(
        csi_pb2.NodeGetStorageHealthRequest(), caller()
    )
    reported = {each.reason: each.message for each in health.backend_health}
    assert set(reported) == {"SnapshotImageMissing", "SnapshotRecordMissing"}
    assert lost.snapshot_id in reported["SnapshotImageMissing"]
    assert orphan.stem in reported["SnapshotRecordMissing"]
    assert orphan.exists()
    listed = await bench.driver.controller.ListSnapshots(csi_pb2.ListSnapshotsRequest(), caller())
    assert {kept.snapshot_id, lost.snapshot_id} < {e.snapshot.snapshot_id for e in listed.entries}
