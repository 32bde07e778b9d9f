"""Growth of images, devices and filesystems, in use and not; and in a node deployment, where no sidecar expands."""

import errno
from collections.abc import Awaitable
from pathlib import Path

import pytest

from crust.blockdriver.controller import topology
from crust.blockdriver.node import node_expand
from crust.blockdriver.records import capability_check
from crust.blockdriver.records.node_state import NotStaged
from crust.blockdriver.services.roles import Role
from crust.core import volumes
from crust.host.block import devices
from crust.host.mounts import growth, mountinfo
from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers.block_driver import MIB, Bench, block, caller, mount
from tests.support.faults.crashes import Killed
from tests.support.raised import raised

pytestmark = pytest.mark.root


@pytest.fixture
def may_resize(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A kernel that grows a mounted ext4 for this process, in words alone; answers what it was asked, in blocks."""
    asked: list[int] = []
    monkeypatch.setattr(growth, "has_cap_sys_resource", lambda: True)
    monkeypatch.setattr(growth, "_resize_ext4", lambda _, blocks: asked.append(blocks))
    return asked


@pytest.fixture
def may_not_resize(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does not, as where root lacks CAP_SYS_RESOURCE."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(growth, "has_cap_sys_resource", lambda: False)
    monkeypatch.setattr(growth, "_resize_ext4", refuse)


async def conditions(bench: Bench, volume_id: str, target: str) -> set[str]:
    """What is wrong with the volume, as NodeGetVolumeStats, ControllerGetVolume and ListVolumes report it."""
    stats = await bench.stats(volume_id, target)
    get = csi_pb2.ControllerGetVolumeRequest(volume_id=volume_id)
    got = await bench.driver.controller.ControllerGetVolume(get, caller())
    listed = (await bench.co.volumes())[volume_id]
    assert stats.condition is not None
    reported = (stats.condition, got.status.volume_condition, listed.status.volume_condition)
    assert len({condition.abnormal for condition in reported}) == 1
    return {condition.message for condition in reported if condition.abnormal}


async def test_node_expand_of_a_raw_volume_grows_with_its_image(bench: Bench) -> None:
    volume_id, target = await bench.published(capability=block())
    grown = await bench.grow(volume_id, 128 * MIB)
    assert not grown.node_expansion_required
    assert devices.size_bytes(target) == 128 * MIB
    assert await bench.expand(volume_id, target) == 128 * MIB


async def test_node_expand_of_a_deferred_volume_grows_the_device_only(bench: Bench) -> None:
    volume_id, target = await bench.published(deferred=True)
    await bench.grow(volume_id, 128 * MIB)
    assert await bench.expand(volume_id, target, deferred=True) == 128 * MIB
    assert await bench.expand(volume_id, bench.staging(volume_id)) == 128 * MIB
    again = await bench.publish(volume_id, target, deferred=True)
    assert again.deferred_mount.capacity_bytes == 128 * MIB


@pytest.mark.parametrize("staged_before", [True, False])
async def test_publish_and_node_expand_ask_kernel_to_grow_ext4(
    bench: Bench, may_resize: list[int], *, staged_before: bool
) -> None:
    volume = await bench.create()
    target = bench.target("pod-a")
    if staged_before:
        await bench.stage(volume.volume_id)
    await bench.grow(volume.volume_id, 128 * MIB)
    await bench.stage(volume.volume_id)
    assert await bench.expand(volume.volume_id, bench.staging(volume.volume_id)) == 128 * MIB
    await bench.publish(volume.volume_id, target)
    assert may_resize == ([128 * MIB // 4096] if staged_before else [])
    await bench.grow(volume.volume_id, 256 * MIB)
    await bench.expand(volume.volume_id, target, 256 * MIB)
    assert may_resize[-1] == 256 * MIB // 4096
    assert await conditions(bench, volume.volume_id, target) == set()


@pytest.mark.parametrize("is_staged", [True, False], ids=["while staged", "between two stages"])
async def test_ungrowable_ext4_keeps_and_reports_its_size(
    bench: Bench, may_not_resize: None, monkeypatch: pytest.MonkeyPatch, *, is_staged: bool
) -> None:
    volume_id, target = await bench.staged(), bench.target("pod-a")
    if not is_staged:
        await bench.unstage(volume_id)
    await bench.grow(volume_id, 128 * MIB)
    await bench.stage(volume_id)
    for path in (bench.staging(volume_id), target):
        with pytest.raises(node_expand.OnlineGrowthRefused, match="CAP_SYS_RESOURCE"):
            await bench.expand(volume_id, path, 128 * MIB)
        await bench.publish(volume_id, target)
    assert (await bench.stats(volume_id, target)).usage[0].total < 64 * MIB
    bench.restart()
    messages = await conditions(bench, volume_id, target)
    assert messages
    assert all("CAP_SYS_RESOURCE" in message for message in messages)
    await bench.unpublish(volume_id, target)

    monkeypatch.setattr(growth, "_resize_ext4", lambda *_: None)
    await bench.publish(volume_id, target)
    assert await conditions(bench, volume_id, target) == set()


async def test_ungrowable_ext4_is_left_to_the_guest(bench: Bench, may_not_resize: None) -> None:
    volume = await bench.create()
    target = bench.target("pod-a")
    await bench.stage(volume.volume_id)
    await bench.grow(volume.volume_id, 128 * MIB)
    await bench.publish(volume.volume_id, target)
    await bench.unpublish(volume.volume_id, target)
    answer = await bench.publish(volume.volume_id, target, deferred=True)
    assert answer.deferred_mount.capacity_bytes == 128 * MIB
    assert await bench.expand(volume.volume_id, target, 128 * MIB, deferred=True) == 128 * MIB
    get = csi_pb2.ControllerGetVolumeRequest(volume_id=volume.volume_id)
    got = await bench.driver.controller.ControllerGetVolume(get, caller())
    assert not got.status.volume_condition.abnormal


async def test_node_expand_of_a_read_only_mount_is_refused(bench: Bench) -> None:
    fs_type, size = "xfs", 320 * MIB
    volume_id, target = await bench.published(capability=mount(fs_type), size=size, readonly=True)
    await bench.expand(volume_id, target, size)
    with raised("DeviceSmallerThanRequested"):
        await bench.expand(volume_id, target, 2 * size)
    await bench.grow(volume_id, 2 * size)
    with pytest.raises(capability_check.AboveLimit):
        await bench.expand(volume_id, target, limit=size)
    for path in (target, bench.staging(volume_id)):
        with pytest.raises(node_expand.OnlineGrowthRefused, match="read-only"):
            await bench.expand(volume_id, path, 2 * size)
    await bench.unpublish(volume_id, target)
    await bench.publish(volume_id, target, mount(fs_type))
    assert (await bench.stats(volume_id, target)).usage[0].total > 1.5 * size


@pytest.mark.parametrize("fs_type", ["xfs", "btrfs"])
async def test_publish_killed_between_mount_and_growth_grows_on_retry(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fs_type: str
) -> None:
    volume_id = await bench.staged(capability=mount(fs_type), size=320 * MIB)
    target = bench.target("pod-a")
    await bench.unstage(volume_id)
    assert (await bench.grow(volume_id, 640 * MIB)).node_expansion_required
    await bench.stage(volume_id, mount(fs_type))

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(growth, "grow_mounted", die)
        with pytest.raises(Killed):
            await bench.publish(volume_id, target, mount(fs_type))
    assert mountinfo.at(target) is not None
    bench.restart()
    await bench.publish(volume_id, target, mount(fs_type))
    assert (await bench.stats(volume_id, target)).usage[0].total > 500 * MIB
    assert len(mountinfo.below(str(bench.root))) == 1


async def test_publish_repeated_under_a_running_pod_changes_nothing(bench: Bench) -> None:
    """An ext4 that this process may not grow while it is mounted: the node state is lost, and the pod must not
    notice.
    """
    volume_id, target = await bench.published()
    before = mountinfo.at(target)
    await bench.grow(volume_id, 128 * MIB)
    await bench.publish(volume_id, target)
    bench.lose_publishes()
    bench.restart()
    for _ in range(2):
        await bench.publish(volume_id, target)
    assert mountinfo.at(target) == before


@pytest.fixture
def deployed(bench: Bench) -> Bench:
    """The driver of one of the nodes."""
    bench.role = Role("all", node_deployment=True)
    bench.restart()
    return bench


def sizes(deployed: Bench, volume_id: str) -> tuple[int, int]:
    """What the record says, and the device or image has."""
    stores, known = deployed.driver.stores, volumes.VolumeId(volume_id)
    return stores.volume_records.load(known).capacity_bytes, stores.provisioning.image_bytes(known)


GROWING = [("xfs", 320 * MIB), ("btrfs", 160 * MIB)]
if growth.has_cap_sys_resource():  # tests/e2e/test_mounted_ext4.py
    GROWING.append(("ext4", 64 * MIB))


@pytest.mark.parametrize(("fs_type", "size"), GROWING)
async def test_node_expand_grows_a_mounted_volume(deployed: Bench, fs_type: str, size: int) -> None:
    volume_id, target = await deployed.published(capability=mount(fs_type), size=size)
    for _ in range(2):  # a retry finds it done
        assert await deployed.expand(volume_id, target, 2 * size) == 2 * size
    assert sizes(deployed, volume_id) == (2 * size, 2 * size)
    assert (await deployed.stats(volume_id, target)).usage[0].total > 1.5 * size
    deployed.restart()
    assert sizes(deployed, volume_id)[0] == 2 * size


async def test_node_expand_grows_raw_volume_and_device_of_deferred_one(
    deployed: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "has_cap_sys_resource", lambda: False)
    monkeypatch.setattr(growth, "grow_mounted", None)  # no filesystem is grown by this host
    for name, capability, deferred in (("raw", block(), False), ("in-guest", mount(), True)):
        volume = await deployed.create(name, capability=capability, size=64 * MIB)
        target = deployed.target(name)
        await deployed.up(volume.volume_id, target, capability, deferred=deferred)
        grown = await deployed.expand(volume.volume_id, target, 128 * MIB, deferred=deferred)
        assert grown == 128 * MIB
        assert sizes(deployed, volume.volume_id) == (128 * MIB, 128 * MIB)
        assert devices.size_bytes(deployed.host_device(volume.volume_id).path) == 128 * MIB


async def test_node_expand_that_cannot_be_changes_no_size(deployed: Bench) -> None:
    volume = await deployed.create(capability=block(), size=64 * MIB)
    target = deployed.target("pod-a")
    with pytest.raises(NotStaged):
        await deployed.expand(volume.volume_id, target, 128 * MIB)
    await deployed.up(volume.volume_id, target, block())
    with raised("OutOfCapacity"):
        await deployed.expand(volume.volume_id, target, 1 << 43)
    with raised("VolumeSizeNotPossible"):
        await deployed.expand(volume.volume_id, target, 1 << 60)
    assert sizes(deployed, volume.volume_id) == (64 * MIB, 64 * MIB)


async def test_creation_follows_the_strict_topology_of_the_selected_node(deployed: Bench) -> None:
    """external-provisioner --node-deployment --strict-topology: requisite and preferred are the selected node."""

    def created(node: str) -> Awaitable[csi_pb2.Volume]:
        selected = csi_pb2.Topology(segments={topology.KEY: node})
        required = csi_pb2.TopologyRequirement(requisite=[selected], preferred=[selected])
        return deployed.create(f"pvc-{node}", block(), accessibility_requirements=required)

    assert [dict(term.segments) for term in (await created("node-1")).accessible_topology] == [
        {topology.KEY: "node-1"}
    ]
    with pytest.raises(topology.TopologyNotAccessible):
        await created("node-2")
