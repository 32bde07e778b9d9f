"""Concurrent use of a volume: targets, kernels, callers."""

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from crust.blockdriver.node import node_unpublish
from crust.core import errors, volumes
from crust.host.block import devices, holders, loop
from crust.host.mounts import mount_api, mountinfo
from tests.support.drivers.block_driver import MIB, Bench, block, is_there, mount
from tests.support.raised import raised

pytestmark = pytest.mark.root


async def test_deferred_publish_mounts_nothing_and_describes_the_device(bench: Bench) -> None:
    volume = await bench.create()
    target = bench.target("pod-a")
    group = volumes.GroupChange(2000, volumes.GroupPolicy.ON_ROOT_MISMATCH)
    capability = mount("ext4", "noatime,_netdev", group=group)
    await bench.stage(volume.volume_id)
    answer = await bench.publish(volume.volume_id, target, capability, deferred=True)
    deferred = answer.deferred_mount
    assert mountinfo.below(str(bench.root)) == ()
    assert not is_there(target)
    [device] = loop.find(str(bench.image(volume.volume_id)))
    assert deferred.block_device.path == device.path
    assert deferred.block_device.identity.disk_sequence == device.identity.disk_sequence
    assert (deferred.fs_type, deferred.capacity_bytes) == ("ext4", 64 * MIB)
    assert list(deferred.mount_options) == ["noatime"]
    assert deferred.supplemental_group == "2000"
    assert deferred.supplemental_group_change_policy == "OnRootMismatch"
    with pytest.raises(node_unpublish.StillPublished, match="pod-a"):
        await bench.unstage(volume.volume_id)
    bench.restart()
    again = await bench.publish(volume.volume_id, target, capability, deferred=True)
    assert again == answer


async def host_options(bench: Bench, volume_id: str) -> set[str]:
    """Those of a publish on the host that keep a program of the volume from gaining anything."""
    target = bench.target("host")
    await bench.up(volume_id, target)
    mounted = mountinfo.at(target)
    assert mounted is not None
    await bench.down(volume_id, target)
    return {"nosuid", "nodev"} & set(mounted.options)


async def test_volume_of_former_guest_is_mounted_nosuid_and_nodev(
    bench: Bench,
) -> None:
    """What only this host has written is mounted as it was asked for."""
    volume_id, target = (await bench.create("guest")).volume_id, bench.target("guest")
    assert await host_options(bench, volume_id) == set()
    await bench.up(volume_id, target, deferred=True)
    await bench.down(volume_id, target)
    assert await host_options(bench, volume_id) == {"nosuid", "nodev"}

    raw_id = await bench.staged("raw", block())
    image = bench.image(raw_id)
    [device] = loop.find(str(image))
    await asyncio.to_thread(subprocess.run, ["mkfs.ext4", "-q", device.path], check=True)
    await bench.unstage(raw_id)
    assert await host_options(bench, raw_id) == {"nosuid", "nodev"}


async def test_deferred_publish_with_an_unknown_host_mount_is_refused(bench: Bench) -> None:
    volume = await bench.create()
    foreign = bench.root / "foreign"
    foreign.mkdir()
    await bench.stage(volume.volume_id)
    [device] = loop.find(str(bench.image(volume.volume_id)))
    mount_api.mount_device(device.path, str(foreign), "ext4")
    with raised("DeviceMountedOnHost", match="foreign"):
        await bench.publish(volume.volume_id, bench.target("pod-a"), deferred=True)
    with pytest.raises(node_unpublish.StillPublished, match="foreign"):
        await bench.unstage(volume.volume_id)
    mount_api.unmount(str(foreign))


async def test_publish_and_unstage_of_a_held_device_are_refused(bench: Bench) -> None:
    volume_id = await bench.staged()
    [device] = loop.find(str(bench.image(volume_id)))
    hold = devices.open_exclusive(device.path)
    try:
        with pytest.raises(holders.DeviceInUse):
            await bench.publish(volume_id, bench.target("pod-a"), deferred=True)
        with pytest.raises(holders.DeviceInUse):
            await bench.publish(volume_id, bench.target("pod-a"))
        assert not is_there(bench.target("pod-a"))
        with pytest.raises(holders.DeviceInUse):
            await bench.unstage(volume_id)
    finally:
        os.close(hold)


async def test_read_only_publishes_on_host_and_in_guest_share_volume(bench: Bench) -> None:
    volume = await bench.create()
    guest, other, host = (bench.target(name) for name in ("guest", "other", "host"))
    await bench.up(volume.volume_id, guest, readonly=True, deferred=True)
    await bench.publish(volume.volume_id, other, readonly=True, deferred=True)
    await bench.publish(volume.volume_id, host, readonly=True)
    mounted = mountinfo.at(host)
    assert mounted is not None
    assert "ro" in mounted.super_options


async def test_deferred_publish_of_a_mounted_btrfs_is_refused(bench: Bench) -> None:
    """Its mounts show a device number of their own, which no device has."""
    capability = mount("btrfs")
    volume_id = (await bench.create(capability=capability, size=160 * MIB)).volume_id
    await bench.stage(volume_id, capability)
    first, second = bench.target("pod-a"), bench.target("pod-b")
    await bench.publish(volume_id, first, capability)
    await bench.publish(volume_id, first, capability)
    await bench.publish(volume_id, second, capability, readonly=True)
    Path(first, "file").write_text("words")
    assert Path(second, "file").read_text() == "words"
    with pytest.raises(OSError, match="Read-only"):
        Path(second, "other").write_text("words")
    with pytest.raises(errors.NotReady):
        await bench.publish(volume_id, bench.target("pod-c"), capability, deferred=True)
    with pytest.raises(errors.NotReady):
        await bench.unstage(volume_id)
    for target in (first, second):
        await bench.unpublish(volume_id, target)
    await bench.unstage(volume_id)
    await bench.up(volume_id, first, capability)
    assert Path(first, "file").read_text() == "words"


async def test_read_only_many_is_published_to_several_pods_of_node(
    bench: Bench,
) -> None:
    """ReadOnlyMany claims arrive as MULTI_NODE_READER_ONLY; the topology says which node has the volume."""
    writer, readers = mount(), mount(mode=volumes.AccessMode.MULTI_NODE_READER_ONLY)
    volume_id = (await bench.create(capability=writer)).volume_id
    await bench.up(volume_id, bench.target("writer"), writer)
    (Path(bench.target("writer")) / "file").write_text("for all")
    await bench.down(volume_id, bench.target("writer"))
    await bench.stage(volume_id, readers)
    for pod in ("a", "b"):
        await bench.publish(volume_id, bench.target(pod), readers)
        assert (Path(bench.target(pod)) / "file").read_text() == "for all"
        with pytest.raises(OSError, match="Read-only"):
            (Path(bench.target(pod)) / "other").touch()
