"""A node whose kernel has RBD uses images as block devices of its own: a real kernel, cluster and driver."""

import signal
import sys

import grpc
import pytest
import rbd

from crust.blockdriver.ceph import claims, fencing
from crust.blockdriver.ceph.claim_object import Mode
from crust.blockdriver.ceph.claims import Host
from crust.blockdriver.ceph.cluster_image import watchers
from crust.blockdriver.ceph.connection import Connection
from crust.blockdriver.ceph.user import CephUser
from crust.blockdriver.engines.rbd.namespace import Namespace
from crust.blockdriver.engines.rbd.provisioning.copies import NewRbdVolume
from crust.blockdriver.engines.rbd.provisioning.snapshots import RbdSnapshots
from crust.core import volumes
from crust.wire.csi.v1 import csi_pb2
from examples.cluster.ceph_cluster import POOL
from tests.support.ceph.krbd_bench import BUS, LOG, SIZE, Bench, Volume, in_a_process, killed_before
from tests.support.faults.refusals import refused, repeated
from tests.support.nodes import kernel_node
from tests.support.raised import raised

pytestmark = [pytest.mark.vm, pytest.mark.asyncio(loop_scope="module")]


async def test_raw_volume_is_host_device_whose_claim_names_kernels_client(
    bench: Bench,
) -> None:
    volume = await bench.written()
    [address] = await volume.mapped()
    [holder] = volume.holders()
    assert (holder.node, holder.is_host, holder.address) == ("node-a", True, address)
    with (
        bench.claimed(volume.id) as cluster_image,
        rbd.Image(cluster_image.ioctx, volume.id, read_only=True) as image,
    ):
        assert address in watchers(image)
        assert image.read(0, 4) == b"kept"
    with (
        bench.claimed(volume.id) as cluster_image,
        pytest.raises(claims.ImageClaimed, match="the kernel of node node-a"),
    ):
        claims.take(cluster_image, Mode.WRITER, Host("node-b", "b"), "sandbox", "vm")
    await volume.end_use()
    await volume.unstage()
    assert await volume.mapped() == []
    assert volume.holders() == ()
    await volume.use()
    assert await volume.read() == "kept"
    assert await volume.mapped() != [address]
    await volume.leave()


async def test_users_key_is_in_no_file_log_or_command_line(bench: Bench) -> None:
    volume = await bench.volume()
    await volume.use()
    seen = await bench.vm.shell(
        f"cat {LOG} /proc/keys {BUS}/*/config_info /run/node/rbd/*/*; dmesg; cat /proc/*/cmdline"
    )
    assert "key=crust.rbd." in seen
    assert bench.key not in seen
    await volume.leave()


async def test_device_grows_with_its_image_while_it_is_open(bench: Bench) -> None:
    volume = await bench.written()
    await bench.vm.shell(f"sleep 1000 <{volume.target} >/dev/null 2>&1 & echo $! >/run/opener")
    await volume.expand()
    assert int(await bench.vm.run("blockdev", "--getsize64", volume.target)) == 2 * SIZE
    assert await volume.read() == "kept"
    await bench.vm.shell("kill $(cat /run/opener)")
    await volume.leave()


async def test_device_that_a_process_has_open_is_not_unmapped(bench: Bench) -> None:
    volume = await bench.volume()
    await volume.stage()
    device = await bench.vm.shell(
        f"echo /dev/$(cd {BUS}; for e in *; do echo rbd$e; done | tail -1)"
    )
    await bench.vm.shell(f"sleep 1000 <{device} >/dev/null 2>&1 & echo $! >/run/opener")
    await refused(volume.unstage(), grpc.StatusCode.FAILED_PRECONDITION, "StillAttached")
    assert await volume.mapped() == [holder.address for holder in volume.holders()]
    await bench.vm.shell("kill $(cat /run/opener)")
    await volume.leave()


@pytest.mark.parametrize("step", ["take", "map", "record", "device", "give_back"])
async def test_driver_killed_before_a_step_is_completed(bench: Bench, step: str) -> None:
    volume = await bench.volume()
    await killed_before(step, volume)
    before = await volume.mapped()
    assert len(before) == (step in {"record", "device"})
    await volume.use()
    await volume.write("kept")
    assert [holder.address for holder in volume.holders()] == await volume.mapped()
    assert await volume.mapped() == (before or await volume.mapped())
    await volume.leave()


async def test_node_that_was_cut_off_never_uses_its_mapping_again(bench: Bench) -> None:
    volume = await bench.written("of A")
    [address] = await volume.mapped()
    with bench.claimed(volume.id) as cluster_image:
        with raised("HolderConnected", match="the kernel of node node-a"):
            fencing.fence(cluster_image, "node-a")
        cut = fencing.fence(cluster_image, "node-a", even_if_connected=True)
        assert cut == (address,)
        claims.take(cluster_image, Mode.WRITER, Host("node-b", "b"), "sandbox", "vm")
        with rbd.Image(cluster_image.ioctx, volume.id) as image:
            image.write(b"of B", 0)
            image.flush()
        with pytest.raises(kernel_node.NodeFailed):
            await volume.write("late")
        with rbd.Image(cluster_image.ioctx, volume.id, read_only=True) as image:
            assert image.read(0, 4) == b"of B"
        await volume.end_use()
        assert await volume.mapped() == []
        await refused(volume.stage(), grpc.StatusCode.FAILED_PRECONDITION, "ImageClaimed")
        assert await volume.mapped() == []
        claims.give_back(cluster_image, "vm")
    await volume.use()
    assert await volume.read() == "of B"
    await volume.leave()


async def test_writers_of_two_nodes_share_a_raw_volume(bench: Bench) -> None:
    volume = await bench.written("of A", "MULTI_NODE_MULTI_WRITER")
    with bench.claimed(volume.id) as cluster_image:
        claims.take(cluster_image, Mode.SHARED, Host("node-b", "b"), "sandbox", "vm")
        with rbd.Image(cluster_image.ioctx, volume.id) as image:
            assert claims.record(cluster_image, "vm")
            assert image.read(0, 4) == b"of A"
            image.write(b"of B", 0)
            image.flush()
            assert await volume.read() == "of B"
            await volume.write("of A again")
            assert image.read(0, 10) == b"of A again"
        claims.give_back(cluster_image, "vm")
    await volume.leave()


async def test_driver_without_a_key_unmaps_with_the_next_key(bench: Bench) -> None:
    """One of the volumes is used again at once, with a claim of its own; the other only by that call's key."""
    volume, used, other = [await bench.volume() for _ in range(3)]
    for raw in (volume, used):
        await raw.use()
        await raw.write("kept")
    await bench.kill_driver()
    await bench.start_driver()
    for raw in (volume, used):
        await raw.end_use()
        assert await raw.mapped() == []
        assert [holder.node for holder in raw.holders()] == ["node-a"]
    await used.stage()
    await other.stage()
    assert volume.holders() == ()
    assert [holder.address for holder in used.holders()] == await used.mapped()
    await used.publish()
    assert await used.read() == "kept"
    for raw in (volume, used, other):
        await raw.leave()


_MAPPED = """\
import sys
from crust.core.volumes import NetworkImage
from crust.blockdriver.host.krbd import KernelRbd, Login
fsid, monitors, user, key, pool, namespace, volume = sys.argv[1:]
kernel, image = KernelRbd("a-pod"), NetworkImage(fsid, pool, namespace, volume, (), "")
why = kernel.obstacle()
if not why:
    before = open("/proc/thread-self/net/dev").read()
    mapping = kernel.map(image, Login([monitors], "prefer-crc", user, key), readonly=False)
    assert open("/proc/thread-self/net/dev").read() == before
    with open(kernel.device(mapping).path, "rb") as device:
        assert device.read(512) == bytes(512)
    kernel.unmap(mapping)
sys.stdout.write(why or "mapped")
"""


async def test_pod_with_own_network_maps_only_in_the_hosts(bench: Bench) -> None:
    volume = await bench.volume()
    await bench.vm.write("/run/mapped.py", _MAPPED)
    monitors = f"{bench.ceph.host}:{bench.ceph.first_port}"
    words = (bench.ceph.fsid, monitors, bench.user, bench.key, POOL, bench.namespace, volume.id)
    script = (sys.executable, "/run/mapped.py", *words)
    assert await bench.vm.run("unshare", "--net", *script) == "mapped"
    sees_no_host = ("unshare", "--net", "--pid", "--fork", "--mount-proc")
    assert "hostPID" in await bench.vm.run(*sees_no_host, *script)
    await volume.leave()


async def test_readers_mapping_is_kept_by_its_claim_until_fenced(bench: Bench) -> None:
    first = await bench.written()
    await first.end_use()
    volume = await bench.volume("MULTI_NODE_READER_ONLY", source=first.id)
    await volume.use(readonly=True)
    [address] = await volume.mapped()
    with bench.claimed(volume.id) as cluster_image:
        with rbd.Image(cluster_image.ioctx, volume.id, read_only=True) as image:
            assert watchers(image) == frozenset()
        with pytest.raises(claims.ImageClaimed):
            claims.take(cluster_image, Mode.WRITER, Host("node-b", "b"), "sandbox", "vm")
        await refused(
            bench.controller.delete(volume.id), grpc.StatusCode.FAILED_PRECONDITION, "StillAttached"
        )
        assert await volume.read() == "kept"
        with pytest.raises(kernel_node.NodeFailed):
            await volume.write("late")
        assert fencing.fence(cluster_image, "node-a") == (address,)
        code, _ = await bench.vm.ask("dd", f"if={volume.target}", "of=/dev/null", "iflag=direct")
        assert code != 0
    await volume.leave()
    await first.leave()


async def test_readers_image_that_was_removed_is_unstaged_and_deleted(bench: Bench) -> None:
    first = await bench.written()
    await first.end_use()
    volume = await bench.volume("MULTI_NODE_READER_ONLY", source=first.id)
    await volume.use(readonly=True)
    with bench.ioctx() as ioctx:
        rbd.RBD().remove(ioctx, volume.id)
    assert await volume.read() == "kept", "of the parent, which has it still"
    await volume.leave()
    await first.leave()


async def test_mapped_image_of_a_pool_that_was_deleted_is_unmapped(bench: Bench) -> None:
    """By a process that knows nothing of the pool: the kernel lets go of what is not there any more."""
    ceph, pool, volume_id = bench.ceph, "ends", volumes.VolumeId("0123456789abcdef-1")
    ceph.make_pool(pool)
    who = CephUser(ceph.monitors, "admin", ceph.keys["client.admin"])
    connection = Connection(who)
    try:
        NewRbdVolume(RbdSnapshots(Namespace.of(connection, pool, "")), volume_id).create(SIZE)
    finally:
        connection.close()
    assert await in_a_process(bench, "attach", pool, "admin", volume_id) == volume_id
    mapped = Volume(bench, volume_id, {}, csi_pb2.VolumeCapability()).mapped
    assert len(await mapped()) == 1
    ceph.delete_pool(pool)
    assert await in_a_process(bench, "detach", pool, "admin", volume_id) == ""
    assert await mapped() == []


async def test_node_switched_off_has_its_image_again_after_its_boot(bench: Bench) -> None:
    volume = await bench.written()
    before = volume.holders()
    await bench.close()
    await bench.vm.reset()
    await bench.prepare()
    assert volume.holders() == before
    await volume.stage_when_free()
    await volume.publish()
    assert await volume.read() == "kept"
    await volume.write("more")
    [holder] = volume.holders()
    assert holder.id != before[0].id
    assert [holder.address] == await volume.mapped()
    await volume.leave()


async def test_dead_monitor_stops_neither_a_mapping_nor_the_next_one(bench: Bench) -> None:
    """The last test here: the monitor stays dead."""
    volume, other = await bench.volume(), await bench.volume()
    await volume.use()
    bench.ceph.daemons.pop("mon.a").end(signal.SIGKILL)
    await volume.write("kept")
    # The first monitor led: until another one does, which a busy machine delays, the monitors answer nobody.
    for raw in (other, volume):
        await repeated(raw.use, grpc.StatusCode.UNAVAILABLE)
    await other.write("other")
    assert (await volume.read(), await other.read()) == ("kept", "other")
    for raw in (other, volume):
        await raw.leave()
