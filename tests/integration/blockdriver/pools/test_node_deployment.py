"""A driver that provisions for its own node alone: no sidecar expands volumes, so NodeExpandVolume does it all."""

from collections.abc import Awaitable
from pathlib import Path

import pytest

from crust.blockdriver.controller import topology
from crust.blockdriver.records import capacity
from crust.blockdriver.records.node_state import NotStaged
from crust.blockdriver.services.roles import Role
from crust.core import volumes
from crust.host.block import devices
from crust.host.filesystems import growth
from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers.block_driver import MIB, Bench, block, mount
from tests.support.raised import raised

pytestmark = pytest.mark.root


@pytest.fixture
def bench(bench: Bench) -> Bench:
    """The driver of one of the nodes."""
    bench.role = Role("all", node_deployment=True)
    bench.restart()
    return bench


def sizes(bench: Bench, volume_id: str) -> tuple[int, int]:
    """What the record says, and the device or image has."""
    stores, known = bench.driver.stores, volumes.VolumeId(volume_id)
    return stores.volume_records.load(known).capacity_bytes, stores.provisioning.image_bytes(known)


@pytest.mark.parametrize(("fs_type", "size"), [("xfs", 320 * MIB), ("btrfs", 160 * MIB)])
async def test_node_expand_grows_a_mounted_volume(bench: Bench, fs_type: str, size: int) -> None:
    volume_id, target = await bench.published(capability=mount(fs_type), size=size)
    for _ in range(2):  # a retry finds it done
        assert await bench.expand(volume_id, target, 2 * size) == 2 * size
    assert sizes(bench, volume_id) == (2 * size, 2 * size)
    assert (await bench.stats(volume_id, target)).usage[0].total > 1.5 * size
    bench.restart()
    assert sizes(bench, volume_id)[0] == 2 * size


async def test_node_expand_grows_a_raw_volume_and_the_device_of_a_deferred_one(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "has_cap_sys_resource", lambda: False)
    monkeypatch.setattr(growth, "grow_mounted", None)  # no filesystem is grown by this host
    for name, capability, deferred in (("raw", block(), False), ("in-guest", mount(), True)):
        volume = await bench.create(name, capability=capability, size=64 * MIB)
        target = bench.target(name)
        await bench.up(volume.volume_id, target, capability, deferred=deferred)
        grown = await bench.expand(volume.volume_id, target, 128 * MIB, deferred=deferred)
        assert grown == 128 * MIB
        assert sizes(bench, volume.volume_id) == (128 * MIB, 128 * MIB)
        attached = bench.driver.stores.access.attached(volumes.VolumeId(volume.volume_id))
        assert attached is not None
        assert devices.size_bytes(attached.host_device.path) == 128 * MIB


async def test_node_expand_that_cannot_be_changes_no_size(bench: Bench) -> None:
    volume = await bench.create(capability=block(), size=64 * MIB)
    target = bench.target("pod-a")
    with pytest.raises(NotStaged):
        await bench.expand(volume.volume_id, target, 128 * MIB)
    await bench.up(volume.volume_id, target, block())
    with raised("OutOfCapacity"):
        await bench.expand(volume.volume_id, target, 1 << 43)
    with pytest.raises(capacity.VolumeSizeNotPossible):
        await bench.expand(volume.volume_id, target, 1 << 60)
    assert sizes(bench, volume.volume_id) == (64 * MIB, 64 * MIB)


async def test_creation_follows_the_strict_topology_of_the_selected_node(bench: Bench) -> None:
    """external-provisioner --node-deployment --strict-topology: requisite and preferred are the selected node."""

    def created(node: str) -> Awaitable[csi_pb2.Volume]:
        selected = csi_pb2.Topology(segments={topology.KEY: node})
        required = csi_pb2.TopologyRequirement(requisite=[selected], preferred=[selected])
        return bench.create(f"pvc-{node}", block(), accessibility_requirements=required)

    assert [dict(each.segments) for each in (await created("node-1")).accessible_topology] == [
        {topology.KEY: "node-1"}
    ]
    with pytest.raises(topology.TopologyNotAccessible):
        await created("node-2")
