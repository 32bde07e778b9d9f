"""Growth of images, devices and filesystems, in use and not."""

import pytest

from crust.blockdriver.node import node_expand
from crust.blockdriver.records import volume_records
from crust.host.block import devices
from crust.host.filesystems import growth
from crust.host.mounts import mountinfo
from crust.host.process import capabilities
from tests.support.block_driver import MIB, Bench, block, mount

pytestmark = pytest.mark.root


@pytest.mark.parametrize(
    ("fs_type", "size"), [("ext4", 64 * MIB), ("xfs", 320 * MIB), ("btrfs", 160 * MIB)]
)
async def test_publish_after_offline_expand_has_the_full_size(
    bench: Bench, fs_type: str, size: int
) -> None:
    volume = await bench.create(capability=mount(fs_type), size=size)
    target = bench.target("pod-a")
    await bench.stage(volume.volume_id, mount(fs_type))
    await bench.unstage(volume.volume_id)
    grown = await bench.grow(volume.volume_id, 2 * size)
    assert grown.capacity_bytes == 2 * size
    assert grown.node_expansion_required
    await bench.stage(volume.volume_id, mount(fs_type))
    await bench.publish(volume.volume_id, target, mount(fs_type))
    stats = await bench.stats(volume.volume_id, target)
    assert stats.usage[0].total > 1.5 * size
    await bench.unpublish(volume.volume_id, target)
    await bench.unstage(volume.volume_id)


@pytest.mark.parametrize("fs_type", ["xfs", "btrfs"])
async def test_node_expand_of_a_mounted_filesystem_grows_it(bench: Bench, fs_type: str) -> None:
    volume = await bench.create(capability=mount(fs_type), size=320 * MIB)
    target = bench.target("pod-a")
    await bench.stage(volume.volume_id, mount(fs_type))
    await bench.publish(volume.volume_id, target, mount(fs_type))
    with pytest.raises(node_expand.DeviceSmallerThanRequested):
        await bench.expand(volume.volume_id, target, 640 * MIB)
    await bench.grow(volume.volume_id, 640 * MIB)
    assert await bench.expand(volume.volume_id, target, 640 * MIB) == 640 * MIB
    stats = await bench.stats(volume.volume_id, target)
    assert stats.usage[0].total > 500 * MIB
    with pytest.raises(volume_records.AboveLimit):
        await bench.expand(volume.volume_id, target, limit=320 * MIB)
    await bench.unpublish(volume.volume_id, target)
    await bench.unstage(volume.volume_id)


async def test_node_expand_of_a_raw_volume_grows_with_its_image(bench: Bench) -> None:
    volume = await bench.create(capability=block())
    target = bench.target("pod-a")
    await bench.stage(volume.volume_id, block())
    await bench.publish(volume.volume_id, target, block())
    grown = await bench.grow(volume.volume_id, 128 * MIB)
    assert not grown.node_expansion_required
    assert devices.size_bytes(target) == 128 * MIB
    assert await bench.expand(volume.volume_id, target) == 128 * MIB
    await bench.unpublish(volume.volume_id, target)
    await bench.unstage(volume.volume_id)


async def test_node_expand_of_a_deferred_volume_grows_the_device_only(bench: Bench) -> None:
    volume = await bench.create()
    target = bench.target("pod-a")
    await bench.stage(volume.volume_id)
    await bench.publish(volume.volume_id, target, deferred=True)
    await bench.grow(volume.volume_id, 128 * MIB)
    assert await bench.expand(volume.volume_id, target, deferred=True) == 128 * MIB
    assert await bench.expand(volume.volume_id, bench.staging(volume.volume_id)) == 128 * MIB
    again = await bench.publish(volume.volume_id, target, deferred=True)
    assert again.deferred_mount.capacity_bytes == 128 * MIB
    await bench.unpublish(volume.volume_id, target)
    await bench.unstage(volume.volume_id)


async def test_node_expand_of_mounted_ext4_needs_the_capability(bench: Bench) -> None:
    """Without CAP_SYS_RESOURCE the kernel refuses: that is said, and the next stage makes up for it."""
    volume = await bench.create()
    target = bench.target("pod-a")
    await bench.stage(volume.volume_id)
    await bench.publish(volume.volume_id, target)
    await bench.grow(volume.volume_id, 128 * MIB)
    if capabilities.has_cap_sys_resource():
        await bench.expand(volume.volume_id, target, 128 * MIB)
    else:
        with pytest.raises(node_expand.OnlineGrowthRefused, match="CAP_SYS_RESOURCE"):
            await bench.expand(volume.volume_id, target, 128 * MIB)
        await bench.unpublish(volume.volume_id, target)
        await bench.unstage(volume.volume_id)
        await bench.stage(volume.volume_id)
        await bench.publish(volume.volume_id, target)
    stats = await bench.stats(volume.volume_id, target)
    assert stats.usage[0].total > 100 * MIB
    await bench.unpublish(volume.volume_id, target)
    await bench.unstage(volume.volume_id)


async def test_node_expand_at_the_staging_path_grows_an_unmounted_volume(bench: Bench) -> None:
    volume = await bench.create()
    target = bench.target("pod-a")
    await bench.stage(volume.volume_id)
    await bench.grow(volume.volume_id, 128 * MIB)
    await bench.expand(volume.volume_id, bench.staging(volume.volume_id), 128 * MIB)
    await bench.publish(volume.volume_id, target)
    stats = await bench.stats(volume.volume_id, target)
    assert stats.usage[0].total > 100 * MIB
    await bench.unpublish(volume.volume_id, target)
    await bench.unstage(volume.volume_id)


@pytest.mark.parametrize(("fs_type", "size"), [("ext4", 64 * MIB), ("xfs", 320 * MIB)])
async def test_node_expand_of_a_read_only_mount_is_refused(
    bench: Bench, fs_type: str, size: int
) -> None:
    volume = await bench.create(capability=mount(fs_type), size=size)
    target = bench.target("pod-a")
    await bench.stage(volume.volume_id, mount(fs_type))
    await bench.publish(volume.volume_id, target, mount(fs_type), readonly=True)
    await bench.expand(volume.volume_id, target, size)
    await bench.grow(volume.volume_id, 2 * size)
    for path in (target, bench.staging(volume.volume_id)):
        with pytest.raises(node_expand.OnlineGrowthRefused, match="read-only"):
            await bench.expand(volume.volume_id, path, 2 * size)
    await bench.unpublish(volume.volume_id, target)
    await bench.publish(volume.volume_id, target, mount(fs_type))
    assert (await bench.stats(volume.volume_id, target)).usage[0].total > 1.5 * size
    await bench.unpublish(volume.volume_id, target)
    await bench.unstage(volume.volume_id)


class Killed(BaseException):
    """Like kill -9: nothing is undone."""


@pytest.mark.parametrize("fs_type", ["xfs", "btrfs"])
async def test_publish_killed_between_mount_and_growth_grows_on_retry(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, fs_type: str
) -> None:
    volume = await bench.create(capability=mount(fs_type), size=320 * MIB)
    target = bench.target("pod-a")
    await bench.stage(volume.volume_id, mount(fs_type))
    await bench.unstage(volume.volume_id)
    await bench.grow(volume.volume_id, 640 * MIB)
    await bench.stage(volume.volume_id, mount(fs_type))

    async def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(growth, "grow_mounted", die)
        with pytest.raises(Killed):
            await bench.publish(volume.volume_id, target, mount(fs_type))
    assert mountinfo.at(target) is not None
    bench.restart()
    await bench.publish(volume.volume_id, target, mount(fs_type))
    assert (await bench.stats(volume.volume_id, target)).usage[0].total > 500 * MIB
    assert len(mountinfo.below(str(bench.root))) == 1
    await bench.unpublish(volume.volume_id, target)
    await bench.unstage(volume.volume_id)


async def test_publish_repeated_under_a_running_pod_changes_nothing(
    bench: Bench,
) -> None:
    """An ext4 that this process may not grow while it is mounted: the node state is lost, and the pod must not
    notice.
    """
    volume = await bench.create()
    target = bench.target("pod-a")
    await bench.stage(volume.volume_id)
    await bench.publish(volume.volume_id, target)
    before = mountinfo.at(target)
    await bench.grow(volume.volume_id, 128 * MIB)
    await bench.publish(volume.volume_id, target)
    for path in bench.root.glob("run/*/published/*"):
        path.unlink()
    bench.restart()
    for _ in range(2):
        await bench.publish(volume.volume_id, target)
    assert mountinfo.at(target) == before
    await bench.unpublish(volume.volume_id, target)
    await bench.unstage(volume.volume_id)
