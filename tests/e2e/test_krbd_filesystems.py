"""A node whose kernel has RBD mounts images on the host: a real kernel, cluster and driver."""

import asyncio
import subprocess
from pathlib import Path

import grpc
import pytest
import rbd

from crust.wire.csi.v1 import csi_pb2
from tests.support.ceph.krbd_bench import KUBELET, MIB, SIZE, Bench, Volume, killed_before
from tests.support.faults.refusals import refused, repeated
from tests.support.nodes import kernel_node

PENDING = (grpc.StatusCode.ABORTED, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
LARGER = [("xfs", 320 * MIB), ("btrfs", 320 * MIB)]
"""Their programs make none that is much smaller."""
pytestmark = [pytest.mark.vm, pytest.mark.asyncio(loop_scope="module")]


@pytest.mark.parametrize(("fs_type", "size"), [("ext4", SIZE), *LARGER])
async def test_filesystem_on_the_host_is_mapped(bench: Bench, fs_type: str, size: int) -> None:
    volume = await bench.volume(fs_type=fs_type, size=size)
    await volume.stage()
    assert await volume.mapped() == []
    assert volume.holders() == ()
    await volume.publish()
    await bench.vm.shell(f"echo kept >{volume.target}/f; sync")
    assert [holder.address for holder in volume.holders()] == await volume.mapped()
    blocks = f"df -Pk {volume.target} | tail -1 | awk '{{print $2}}'"
    before = int(await bench.vm.shell(blocks))
    await volume.expand()
    assert int(await bench.vm.shell(blocks)) > 1.8 * before
    await volume.publish()
    await volume.end_use()
    assert volume.holders() == ()
    await volume.use()
    assert await bench.vm.shell(f"cat {volume.target}/f") == "kept"
    await volume.leave()


async def test_volume_moves_between_host_and_guests(bench: Bench, tmp_path: Path) -> None:
    volume = await bench.volume(fs_type="ext4")
    await volume.stage()
    answer = await volume.publish(deferred=True)
    assert answer.deferred_mount.HasField("format")
    await refused(
        _at(volume, "other").publish(), grpc.StatusCode.FAILED_PRECONDITION, "PublishedElsewhere"
    )
    assert await volume.mapped() == []
    await _format_as_a_guest(bench, volume, tmp_path)
    await volume.unpublish()
    await volume.publish()
    assert await bench.vm.shell(f"cat {volume.target}/f") == "of a guest"
    await refused(
        _at(volume, "other").publish(deferred=True),
        grpc.StatusCode.FAILED_PRECONDITION,
        "PublishedElsewhere",
    )
    await bench.vm.shell(f"echo of the host >{volume.target}/f; sync")
    await volume.unpublish()
    answer = await volume.publish(deferred=True)
    assert answer.deferred_mount.network_image.image == volume.id
    assert await volume.mapped() == []
    assert volume.holders() == ()
    await volume.unpublish()
    await volume.publish()
    assert await bench.vm.shell(f"cat {volume.target}/f") == "of the host"
    await volume.leave()


async def test_driver_killed_while_mapping_for_mount_lets_guest_have_volume(bench: Bench) -> None:
    volume = await bench.volume(fs_type="ext4")
    await volume.stage()
    await killed_before("device", volume)
    assert len(await volume.mapped()) == 1
    answer = await volume.publish(deferred=True)
    assert answer.deferred_mount.HasField("format")
    assert await volume.mapped() == []
    await volume.leave()


async def test_readers_mount_a_filesystem_and_nothing_is_made_for_them(bench: Bench) -> None:
    first = await bench.volume(fs_type="ext4")
    await first.use()
    await bench.vm.shell(f"echo kept >{first.target}/f; sync")
    await first.end_use()
    reader = await bench.volume("MULTI_NODE_READER_ONLY", source=first.id, fs_type="ext4")
    await reader.use(readonly=True)
    assert await bench.vm.shell(f"cat {reader.target}/f") == "kept"
    with pytest.raises(kernel_node.NodeFailed, match="Read-only"):
        await bench.vm.shell(f"echo late >{reader.target}/f")
    await reader.leave()
    await first.leave()
    empty = await bench.volume("MULTI_NODE_READER_ONLY", fs_type="ext4")
    await empty.stage()
    await refused(
        empty.publish(readonly=True),
        grpc.StatusCode.FAILED_PRECONDITION,
        "ReadOnlyVolumeNotFormatted",
    )
    await empty.leave()


def _at(volume: Volume, name: str) -> Volume:
    """The same volume, at another target."""

    class _Elsewhere(Volume):
        @property
        def target(self) -> str:
            return f"{KUBELET}/{name}-{self.id}"

    return _Elsewhere(volume.bench, volume.id, volume.context, volume.capability)


async def _format_as_a_guest(bench: Bench, volume: Volume, tmp_path: Path) -> None:
    """What a guest does with its disk: an ext4 with one file."""
    source, file = tmp_path / "source", tmp_path / "ext4"
    source.mkdir()
    (source / "f").write_text("of a guest\n")
    file.touch()
    await asyncio.to_thread(
        subprocess.run,
        ["mkfs.ext4", "-q", "-d", str(source), str(file), f"{SIZE // 1024}k"],
        check=True,
        timeout=60,
    )
    with bench.ioctx() as ioctx, rbd.Image(ioctx, volume.id) as image:
        image.write(file.read_bytes(), 0)
        image.flush()


async def test_unpublish_below_cluster_that_stops_ends_when_it_is_back(bench: Bench) -> None:
    """The kernel waits; the driver answers others, and a repeated call joins the first one."""
    volume = await bench.volume(fs_type="ext4")
    await volume.use()
    # Written before the cluster stops: the kernel itself initializes a new filesystem, and a writer waits for that.
    await bench.vm.shell(f"cd {volume.target}; echo kept >f; sync; echo late >g")
    with bench.ceph.osd.frozen():
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await volume.unpublish(timeout_s=5)
            assert caught.value.code() in PENDING, caught.value.details()
        await bench.node.node.NodeGetCapabilities(csi_pb2.NodeGetCapabilitiesRequest(), timeout=20)
    await repeated(volume.unpublish, *PENDING)
    await volume.publish()
    assert await bench.vm.shell(f"cat {volume.target}/f {volume.target}/g") == "kept\nlate"
    await volume.leave()
