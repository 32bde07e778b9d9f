"""A node whose kernel has RBD uses images as block devices of its own: a real kernel, cluster and driver.

The node is a virtual machine (`kernel_node`), in which `crust driver --mode node` runs with the keys that its calls
bring. The controller runs on this host.
"""

import asyncio
import contextlib
import subprocess
import sys
import tomllib
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
import rbd

from crust.ceph import claim_object, claims, fencing
from crust.ceph.claim_object import Holder, Mode
from crust.ceph.claims import Host
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from examples.cluster import ceph_cluster
from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.support.ceph import rbd_driver
from tests.support.ceph.rbd_driver import RbdDriver
from tests.support.faults.refusals import refused
from tests.support.nodes import kernel_node
from tests.support.nodes.kernel_node import KernelNode

pytestmark = [pytest.mark.vm, pytest.mark.timeout(480), pytest.mark.asyncio(loop_scope="module")]

MIB = 1 << 20
SIZE = 32 * MIB
AccessMode = csi_pb2.VolumeCapability.AccessMode
_KUBELET = "/var/lib/kubelet"
_CONFIG, _LOG, _PID = "/etc/node.toml", "/var/log/node.log", "/run/node.pid"
_BUS = "/sys/bus/rbd/devices"


@dataclass
class Bench:
    """The cluster, a controller on this host, and a node."""

    ceph: CephCluster
    namespace: str
    user: str
    key: str
    controller: Any
    vm: KernelNode
    channels: list[grpc.aio.Channel] = field(default_factory=list)

    async def prepare(self) -> None:
        """Configure and start the driver of a node that has booted."""
        await self.vm.write(_CONFIG, _config(self.ceph, self.namespace))
        await self.start_driver()

    async def close(self) -> None:
        """Close the connections to the driver."""
        for each in self.channels:
            await each.close()
        self.channels.clear()

    async def start_driver(self) -> None:
        """Start the node's driver, and wait until it serves."""
        socket = kernel_node.SOCKET
        await self.vm.shell(
            f"mkdir -p {Path(socket).parent}; chmod 700 {Path(socket).parent}\n"
            f"export PYTHONDONTWRITEBYTECODE=1\n"
            f"{sys.executable} -m crust driver --config={_CONFIG} --mode=node --socket={socket} --run-dir=/run/node"
            f" --node-id=node-a >>{_LOG} 2>&1 & echo $! >{_PID}"
        )
        made = self.vm.channel()
        self.channels.append(made)
        identity = csi_pb2_grpc.IdentityStub(made)
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    found = await identity.Probe(csi_pb2.ProbeRequest(), timeout=20)
                    if found.ready.value:
                        return
                await asyncio.sleep(0.2)

    async def kill_driver(self) -> None:
        """SIGKILL."""
        await self.vm.shell(f"kill -9 $(cat {_PID}); rm {_PID}")
        await self.close()

    @property
    def node(self) -> Any:
        """The node's stub."""
        return csi_pb2_grpc.NodeStub(self.channels[-1])

    async def delete(self, volume_id: str) -> None:
        """Delete a volume; a controller that flattens its clone has it open meanwhile, and the CO retries."""
        request = csi_pb2.DeleteVolumeRequest(volume_id=volume_id)
        async with asyncio.timeout(60):
            while True:
                try:
                    await self.controller.DeleteVolume(request, timeout=60)
                except grpc.aio.AioRpcError as err:
                    if "StillAttached" not in (err.details() or ""):
                        raise
                else:
                    return

    async def volume(
        self, mode: str = "SINGLE_NODE_WRITER", *, source: str = "", fs_type: str = ""
    ) -> "Volume":
        """A new raw volume, or one with a filesystem."""
        capability = csi_pb2.VolumeCapability(
            access_mode=AccessMode(mode=AccessMode.Mode.Value(mode))
        )
        if fs_type:
            capability.mount.fs_type = fs_type
        else:
            capability.block.SetInParent()
        request = csi_pb2.CreateVolumeRequest(
            name=uuid.uuid4().hex,
            volume_capabilities=[capability],
            capacity_range=csi_pb2.CapacityRange(required_bytes=SIZE),
        )
        if source:
            request.volume_content_source.volume.volume_id = source
        made = await self.controller.CreateVolume(request, timeout=60)
        return Volume(self, made.volume.volume_id, dict(made.volume.volume_context), capability)

    @contextlib.contextmanager
    def ioctx(self) -> Iterator[Any]:
        with self.ceph.ioctx(POOL, self.namespace) as found:
            yield found


@dataclass
class Volume:
    """A raw volume, and where it is used on the node."""

    bench: Bench
    id: str
    context: dict[str, str]
    capability: csi_pb2.VolumeCapability

    @property
    def staging(self) -> str:
        return f"{_KUBELET}/staging-{self.id}"

    @property
    def target(self) -> str:
        return f"{_KUBELET}/target-{self.id}"

    async def stage(self) -> None:
        await self.bench.vm.run("mkdir", "-p", self.staging)
        await self.bench.node.NodeStageVolume(
            csi_pb2.NodeStageVolumeRequest(
                volume_id=self.id,
                staging_target_path=self.staging,
                volume_capability=self.capability,
                volume_context=self.context,
                secrets={"userID": self.bench.user, "userKey": self.bench.key},
            ),
            timeout=60,
        )

    async def publish(self, *, readonly: bool = False, deferred: bool = False) -> Any:
        return await self.bench.node.NodePublishVolume(
            csi_pb2.NodePublishVolumeRequest(
                volume_id=self.id,
                staging_target_path=self.staging,
                target_path=self.target,
                volume_capability=self.capability,
                volume_context=self.context,
                readonly=readonly,
                defer_fs_ops=deferred,
                secrets={"userID": self.bench.user, "userKey": self.bench.key},
            ),
            timeout=60,
            metadata=(("crust-extensions", "deferral"),),
        )

    async def unpublish(self) -> None:
        request = csi_pb2.NodeUnpublishVolumeRequest(volume_id=self.id, target_path=self.target)
        await self.bench.node.NodeUnpublishVolume(request, timeout=60)

    async def unstage(self) -> None:
        request = csi_pb2.NodeUnstageVolumeRequest(
            volume_id=self.id, staging_target_path=self.staging
        )
        await self.bench.node.NodeUnstageVolume(request, timeout=60)

    async def leave(self) -> None:
        """Unpublish, unstage, delete; nothing is left in the pool or the kernel."""
        await self.unpublish()
        await self.unstage()
        assert await self.mapped() == []
        await self.bench.delete(self.id)
        assert self.holders() == ()

    async def mapped(self) -> list[str]:
        """The addresses of the kernel's clients that have the image."""
        found = await self.bench.vm.shell(
            f"cd {_BUS}; for each in *; do [ -e $each ] || continue;"
            f' [ "$(cat $each/name)" != {self.id} ] || cat $each/client_addr; done'
        )
        return found.split()

    def holders(self) -> tuple[Holder, ...]:
        """Who has a claim."""
        with self.bench.ioctx() as ioctx:
            return claim_object.read(ioctx, self.id).claims.holders

    async def write(self, text: str) -> None:
        """Write at the start of the device, durably, as a pod does."""
        await self.bench.vm.run(
            "/bin/sh", "-c", f"dd of={self.target} bs=512 conv=sync,notrunc,fsync oflag=direct 2>&1",
            text=text,
        )  # fmt: skip

    async def read(self) -> str:
        """What is at the start of the device, from the cluster."""
        return await self.bench.vm.shell(
            f"dd if={self.target} bs=512 count=1 iflag=direct 2>/dev/null | tr -d '\\0'"
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    """A cluster that the node reaches, with a manager, without which no capacity is known."""
    directory = tmp_path_factory.mktemp("krbd")
    async with contextlib.AsyncExitStack() as held:
        network = held.enter_context(kernel_node.network())
        ceph = held.enter_context(
            ceph_cluster.running(directory / "c", with_mgr=True, host=network.host)
        )
        driver = held.enter_context(rbd_driver.serving(ceph))
        vm = await held.enter_async_context(kernel_node.running(directory, network))
        connected = await held.enter_async_context(channel.connect(str(driver.socket)))
        namespace, user = _namespace(driver), f"node-{driver.base.name}"
        key = ceph.node(user, namespace)
        made = Bench(ceph, namespace, user, key, csi_pb2_grpc.ControllerStub(connected), vm)
        await made.prepare()
        await _capacity_known(made)
        yield made
        await made.close()


def _namespace(driver: RbdDriver) -> str:
    found: str = tomllib.loads(driver.config.read_text())["rbd"]["namespace"]
    return found


def _config(ceph: CephCluster, namespace: str) -> str:
    return f"""engine = "rbd"
log_level = "debug"
target_roots = ["{_KUBELET}"]
check_propagation = false

[rbd]
monitors = "{ceph.monitors}"
pool = "{POOL}"
namespace = "{namespace}"
"""


async def _capacity_known(bench: Bench) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                made = await bench.volume()
            except grpc.aio.AioRpcError as err:
                if err.code() not in {
                    grpc.StatusCode.FAILED_PRECONDITION,
                    grpc.StatusCode.UNAVAILABLE,
                }:
                    raise
                await asyncio.sleep(0.3)
                continue
            await bench.delete(made.id)
            return


async def test_raw_volume_is_a_device_of_the_host_and_its_claim_names_the_kernels_client(
    bench: Bench,
) -> None:
    volume = await bench.volume()
    await volume.stage()
    await volume.publish()
    await volume.write("kept")
    [address] = await volume.mapped()
    [holder] = volume.holders()
    assert (holder.node, holder.is_host, holder.address) == ("node-a", True, address)
    with bench.ioctx() as ioctx, rbd.Image(ioctx, volume.id, read_only=True) as image:
        assert address in claims.watchers(image)
        assert image.read(0, 4) == b"kept"
    with (
        bench.ioctx() as ioctx,
        pytest.raises(claims.ImageClaimed, match="the kernel of node node-a"),
    ):
        claims.take(ioctx, volume.id, Mode.WRITER, Host("node-b", "b"), "sandbox", "vm")
    await volume.unpublish()
    await volume.unstage()
    await volume.unstage()
    assert await volume.mapped() == []
    assert volume.holders() == ()
    await volume.stage()
    await volume.publish()
    assert await volume.read() == "kept"
    assert await volume.mapped() != [address]
    await volume.leave()


async def test_users_key_is_in_no_file_log_command_line_or_attribute_of_the_node(
    bench: Bench,
) -> None:
    volume = await bench.volume()
    await volume.stage()
    await volume.publish()
    seen = await bench.vm.shell(
        f"cat {_LOG} /proc/keys {_BUS}/*/config_info /run/node/rbd/*/*; dmesg; cat /proc/*/cmdline"
    )
    assert "key=crust.rbd." in seen
    assert bench.key not in seen
    await volume.leave()


async def test_device_grows_with_its_image_while_it_is_open(bench: Bench) -> None:
    volume = await bench.volume()
    await volume.stage()
    await volume.publish()
    await volume.write("kept")
    await bench.vm.shell(f"sleep 1000 <{volume.target} >/dev/null 2>&1 & echo $! >/run/opener")
    await expanded(volume)
    assert int(await bench.vm.run("blockdev", "--getsize64", volume.target)) == 2 * SIZE
    assert await volume.read() == "kept"
    await bench.vm.shell("kill $(cat /run/opener)")
    await volume.leave()


async def test_device_that_a_process_has_open_is_not_unmapped(bench: Bench) -> None:
    volume = await bench.volume()
    await volume.stage()
    device = await bench.vm.shell(
        f"echo /dev/$(cd {_BUS}; for e in *; do echo rbd$e; done | tail -1)"
    )
    await bench.vm.shell(f"sleep 1000 <{device} >/dev/null 2>&1 & echo $! >/run/opener")
    await refused(volume.unstage(), grpc.StatusCode.FAILED_PRECONDITION, "StillAttached")
    assert await volume.mapped() == [each.address for each in volume.holders()]
    await bench.vm.shell("kill $(cat /run/opener)")
    await volume.leave()


async def expanded(volume: Volume) -> None:
    """Grown to twice its size, by both parts."""
    wanted = csi_pb2.CapacityRange(required_bytes=2 * SIZE)
    request = csi_pb2.ControllerExpandVolumeRequest(
        volume_id=volume.id, capacity_range=wanted, volume_capability=volume.capability
    )
    await volume.bench.controller.ControllerExpandVolume(request, timeout=60)
    await volume.bench.node.NodeExpandVolume(
        csi_pb2.NodeExpandVolumeRequest(
            volume_id=volume.id,
            volume_path=volume.target,
            capacity_range=wanted,
            volume_capability=volume.capability,
            secrets={"userID": volume.bench.user, "userKey": volume.bench.key},
        ),
        timeout=60,
    )


_KILLED = """\
import os, signal, sys
from crust import volumes
from crust.blockdriver.engines.protocol import Access
from crust.blockdriver.engines.rbd import Place
from crust.blockdriver.engines.rbd.node import access, host_devices, own_user
from crust.ceph import connection, host_claims, user as ceph_user
from crust.host.block import krbd
step, monitors, user, key, pool, namespace, volume = sys.argv[1:]
place = Place(connection.Connection(ceph_user.CephUser(monitors, user, key)), pool, namespace)
here = access.RbdAccess(own_user.OwnUser(place), "/run/node", "node-a")
if step == "give_back":
    here.attach(volumes.VolumeId(volume), Access(on_host=True))
where = {"map": krbd.KernelRbd, "device": krbd.KernelRbd}.get(step, host_claims.HostClaim)
setattr(where, step, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
if step == "give_back":
    here.detach(volumes.VolumeId(volume))
here.attach(volumes.VolumeId(volume), Access(on_host=True))
"""


@pytest.mark.parametrize("step", ["take", "map", "record", "device", "give_back"])
async def test_driver_that_is_killed_before_a_step_is_completed_by_its_successor(
    bench: Bench, step: str
) -> None:
    volume = await bench.volume()
    await bench.vm.write("/run/killed.py", _KILLED)
    arguments = (step, bench.ceph.monitors, bench.user, bench.key, POOL, bench.namespace, volume.id)
    code, output = await bench.vm.ask(sys.executable, "/run/killed.py", *arguments)
    assert code == -9, output
    before = await volume.mapped()
    assert len(before) == (step in {"record", "device"})
    await volume.stage()
    await volume.publish()
    await volume.write("kept")
    assert [each.address for each in volume.holders()] == await volume.mapped()
    assert await volume.mapped() == (before or await volume.mapped())
    await volume.leave()


async def test_node_that_was_cut_off_writes_nothing_more_and_its_mapping_is_not_used_again(
    bench: Bench,
) -> None:
    volume = await bench.volume()
    await volume.stage()
    await volume.publish()
    await volume.write("of A")
    [address] = await volume.mapped()
    admin = bench.ceph.admin
    with bench.ioctx() as ioctx:
        with pytest.raises(fencing.HolderConnected, match="the kernel of node node-a"):
            fencing.fence(admin, ioctx, volume.id, "node-a")
        cut = fencing.fence(admin, ioctx, volume.id, "node-a", even_if_connected=True)
        assert cut == (address,)
        claims.take(ioctx, volume.id, Mode.WRITER, Host("node-b", "b"), "sandbox", "vm")
        with rbd.Image(ioctx, volume.id) as image:
            image.write(b"of B", 0)
            image.flush()
        with pytest.raises(kernel_node.NodeFailed):
            await volume.write("late")
        with rbd.Image(ioctx, volume.id, read_only=True) as image:
            assert image.read(0, 4) == b"of B"
        await volume.unpublish()
        await volume.unstage()
        assert await volume.mapped() == []
        await refused(volume.stage(), grpc.StatusCode.FAILED_PRECONDITION, "ImageClaimed")
        assert await volume.mapped() == []
        claims.give_back(ioctx, volume.id, "vm")
    await volume.stage()
    await volume.publish()
    assert await volume.read() == "of B"
    await volume.leave()


@pytest.mark.parametrize(
    "mode",
    [
        "SINGLE_NODE_MULTI_WRITER",
        "SINGLE_NODE_SINGLE_WRITER",
        "SINGLE_NODE_READER_ONLY",
        "MULTI_NODE_READER_ONLY",
        "MULTI_NODE_MULTI_WRITER",
    ],
)
async def test_each_raw_mode_is_staged_and_published(bench: Bench, mode: str) -> None:
    volume = await bench.volume(mode)
    await volume.stage()
    await volume.publish(readonly="READER" in mode)
    code, _ = await bench.vm.ask(
        "dd", "if=/dev/zero", f"of={volume.target}", "bs=4096", "count=1", "conv=fsync"
    )
    assert (code == 0) == ("READER" not in mode)
    await volume.leave()


async def test_readers_read_and_cannot_write(bench: Bench) -> None:
    first = await bench.volume()
    await first.stage()
    await first.publish()
    await first.write("kept")
    await first.unpublish()
    await first.unstage()
    volume = await bench.volume("MULTI_NODE_READER_ONLY", source=first.id)
    with bench.ioctx() as ioctx:
        claims.take(ioctx, volume.id, Mode.READERS, Host("node-b", "b"), "sandbox", "vm")
        await volume.stage()
        await volume.publish(readonly=True)
        assert await volume.read() == "kept"
        with pytest.raises(kernel_node.NodeFailed, match=r"[Rr]ead-only|not permitted"):
            await volume.write("late")
        assert {each.node for each in volume.holders()} == {"node-a", "node-b"}
        with pytest.raises(claims.ImageClaimed):
            claims.take(ioctx, volume.id, Mode.WRITER, Host("node-c", "c"), "sandbox", "other")
        claims.give_back(ioctx, volume.id, "vm")
    await volume.leave()
    await first.leave()


async def test_writers_of_two_nodes_share_a_raw_volume(bench: Bench) -> None:
    volume = await bench.volume("MULTI_NODE_MULTI_WRITER")
    await volume.stage()
    await volume.publish()
    await volume.write("of A")
    with bench.ioctx() as ioctx:
        claims.take(ioctx, volume.id, Mode.SHARED, Host("node-b", "b"), "sandbox", "vm")
        with rbd.Image(ioctx, volume.id) as image:
            assert claims.record(ioctx, volume.id, "vm")
            assert image.read(0, 4) == b"of A"
            image.write(b"of B", 0)
            image.flush()
            assert await volume.read() == "of B"
            await volume.write("of A again")
            assert image.read(0, 10) == b"of A again"
        claims.give_back(ioctx, volume.id, "vm")
    await volume.leave()


async def test_driver_without_a_key_unmaps_and_gives_the_claims_back_with_the_next_key(
    bench: Bench,
) -> None:
    """One of the volumes is used again at once, with a claim of its own; the other only by that call's key."""
    volume, used, other = [await bench.volume() for _ in range(3)]
    for each in (volume, used):
        await each.stage()
        await each.publish()
        await each.write("kept")
    await bench.kill_driver()
    await bench.start_driver()
    for each in (volume, used):
        await each.unpublish()
        await each.unstage()
        assert await each.mapped() == []
        assert [holder.node for holder in each.holders()] == ["node-a"]
    await used.stage()
    await other.stage()
    assert volume.holders() == ()
    assert [each.address for each in used.holders()] == await used.mapped()
    await used.publish()
    assert await used.read() == "kept"
    for each in (volume, used, other):
        await each.leave()


async def test_filesystem_is_mounted_on_the_host_mapped_at_the_publish_and_grows(
    bench: Bench,
) -> None:
    volume = await bench.volume(fs_type="ext4")
    await volume.stage()
    assert await volume.mapped() == []
    assert volume.holders() == ()
    await volume.publish()
    await bench.vm.shell(f"echo kept >{volume.target}/f; sync")
    assert [each.address for each in volume.holders()] == await volume.mapped()
    blocks = f"df -Pk {volume.target} | tail -1 | awk '{{print $2}}'"
    before = int(await bench.vm.shell(blocks))
    await expanded(volume)
    assert int(await bench.vm.shell(blocks)) > 1.8 * before
    await volume.publish()
    await volume.unpublish()
    await volume.unstage()
    assert volume.holders() == ()
    await volume.stage()
    await volume.publish()
    assert await bench.vm.shell(f"cat {volume.target}/f") == "kept"
    await volume.leave()


async def test_volume_moves_between_the_host_and_guests_and_neither_formats_what_the_other_made(
    bench: Bench, tmp_path: Path
) -> None:
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


_MAPPED = """\
import sys
from crust.host.block.krbd import ImageName, KernelRbd, Login
fsid, monitors, user, key, pool, namespace, volume = sys.argv[1:]
kernel, image = KernelRbd("a-pod"), ImageName(fsid, pool, namespace, volume)
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


async def test_pod_with_a_network_of_its_own_maps_in_the_hosts_or_not_at_all(bench: Bench) -> None:
    volume = await bench.volume()
    await bench.vm.write("/run/mapped.py", _MAPPED)
    monitors = f"{bench.ceph.host}:{bench.ceph.first_port}"
    words = (bench.ceph.fsid, monitors, bench.user, bench.key, POOL, bench.namespace, volume.id)
    script = (sys.executable, "/run/mapped.py", *words)
    assert await bench.vm.run("unshare", "--net", *script) == "mapped"
    sees_no_host = ("unshare", "--net", "--pid", "--fork", "--mount-proc")
    assert "hostPID" in await bench.vm.run(*sees_no_host, *script)
    await volume.leave()


@pytest.mark.parametrize("then", ["host", "guest"])
async def test_driver_that_was_killed_while_it_mapped_for_a_mount_is_completed(
    bench: Bench, then: str
) -> None:
    volume = await bench.volume(fs_type="ext4")
    await volume.stage()
    await bench.vm.write("/run/killed.py", _KILLED)
    arguments = ("device", bench.ceph.monitors, bench.user, bench.key, POOL, bench.namespace)
    code, output = await bench.vm.ask(sys.executable, "/run/killed.py", *arguments, volume.id)
    assert code == -9, output
    assert len(await volume.mapped()) == 1
    answer = await volume.publish(deferred=then == "guest")
    if then == "guest":
        assert answer.deferred_mount.HasField("format")
        assert await volume.mapped() == []
    else:
        await bench.vm.shell(f"echo kept >{volume.target}/f; sync")
    await volume.leave()


async def test_sandbox_that_has_the_image_keeps_it_and_the_volume_stays_staged(
    bench: Bench,
) -> None:
    volume = await bench.volume(fs_type="ext4")
    await volume.stage()
    with bench.ioctx() as ioctx:
        claims.take(ioctx, volume.id, Mode.WRITER, Host("node-b", "b"), "sandbox", "vm")
        await refused(volume.publish(), grpc.StatusCode.FAILED_PRECONDITION, "ImageClaimed")
        assert await volume.mapped() == []
        claims.give_back(ioctx, volume.id, "vm")
    answer = await volume.publish(deferred=True)
    assert answer.deferred_mount.network_image.image == volume.id
    await volume.leave()


async def test_readers_mount_a_filesystem_and_nothing_is_made_for_them(bench: Bench) -> None:
    first = await bench.volume(fs_type="ext4")
    await first.stage()
    await first.publish()
    await bench.vm.shell(f"echo kept >{first.target}/f; sync")
    await first.unpublish()
    await first.unstage()
    reader = await bench.volume("MULTI_NODE_READER_ONLY", source=first.id, fs_type="ext4")
    await reader.stage()
    await reader.publish(readonly=True)
    assert await bench.vm.shell(f"cat {reader.target}/f") == "kept"
    with pytest.raises(kernel_node.NodeFailed, match="Read-only"):
        await bench.vm.shell(f"echo late >{reader.target}/f")
    await reader.leave()
    await first.leave()
    empty = await bench.volume("MULTI_NODE_READER_ONLY", fs_type="ext4")
    await empty.stage()
    await refused(
        empty.publish(readonly=True), grpc.StatusCode.FAILED_PRECONDITION, "NothingToRead"
    )
    await empty.leave()


def _at(volume: Volume, name: str) -> Volume:
    """The same volume, at another target."""

    class _Elsewhere(Volume):
        @property
        def target(self) -> str:
            return f"{_KUBELET}/{name}-{self.id}"

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


async def test_mapping_that_no_driver_looks_after_keeps_its_claim_and_is_cut_off_by_its_own_address(
    bench: Bench,
) -> None:
    """The claim has no lease that somebody must renew, and the driver that is started again has no key."""
    volume, other = [await bench.volume() for _ in range(2)]
    await volume.stage()
    await volume.publish()
    await volume.write("of A")
    await bench.kill_driver()
    _check_nobody_else_gets(volume)
    await bench.start_driver()
    _check_nobody_else_gets(volume)
    await volume.write("of A again")
    [address] = await volume.mapped()
    with bench.ioctx() as ioctx:
        cut = fencing.fence(bench.ceph.admin, ioctx, volume.id, "node-a", even_if_connected=True)
        assert cut == (address,)
        claims.take(ioctx, volume.id, Mode.WRITER, Host("node-b", "b"), "sandbox", "vm")
        with rbd.Image(ioctx, volume.id) as image:
            assert image.read(0, 10) == b"of A again"
            image.write(b"of B", 0)
            image.flush()
        await other.stage()
        assert address not in {each.address for each in other.holders()}
        with pytest.raises(kernel_node.NodeFailed):
            await volume.write("late")
        with rbd.Image(ioctx, volume.id, read_only=True) as image:
            assert image.read(0, 4) == b"of B"
        claims.give_back(ioctx, volume.id, "vm")
    await volume.leave()
    await other.leave()


def _check_nobody_else_gets(volume: Volume) -> None:
    """Neither another node, early or late, nor one that fences without insisting."""
    other = Host("node-b", "b")
    with volume.bench.ioctx() as ioctx:
        with pytest.raises(claims.ImageClaimed):
            claims.check_claimable(ioctx, volume.id, Mode.WRITER, other)
        with pytest.raises(claims.ImageClaimed):
            claims.take(ioctx, volume.id, Mode.WRITER, other, "sandbox", "vm")
        with pytest.raises(fencing.HolderConnected, match="the kernel of node node-a"):
            fencing.fence(volume.bench.ceph.admin, ioctx, volume.id, "node-a")


async def test_readers_mapping_is_kept_by_its_claim_alone_and_fencing_ends_its_reads(
    bench: Bench,
) -> None:
    first = await _written(bench)
    volume = await bench.volume("MULTI_NODE_READER_ONLY", source=first.id)
    await volume.stage()
    await volume.publish(readonly=True)
    [address] = await volume.mapped()
    with bench.ioctx() as ioctx:
        with rbd.Image(ioctx, volume.id, read_only=True) as image:
            assert claims.watchers(image) == frozenset()
        with pytest.raises(claims.ImageClaimed):
            claims.take(ioctx, volume.id, Mode.WRITER, Host("node-b", "b"), "sandbox", "vm")
        deletion = csi_pb2.DeleteVolumeRequest(volume_id=volume.id)
        await refused(
            bench.controller.DeleteVolume(deletion, timeout=60),
            grpc.StatusCode.FAILED_PRECONDITION,
            "StillAttached",
        )
        assert await volume.read() == "kept"
        assert fencing.fence(bench.ceph.admin, ioctx, volume.id, "node-a") == (address,)
        code, _ = await bench.vm.ask("dd", f"if={volume.target}", "of=/dev/null", "iflag=direct")
        assert code != 0
    await volume.leave()
    await first.leave()


async def test_readers_image_that_was_removed_behind_the_back_is_unstaged_and_deleted(
    bench: Bench,
) -> None:
    first = await _written(bench)
    volume = await bench.volume("MULTI_NODE_READER_ONLY", source=first.id)
    await volume.stage()
    await volume.publish(readonly=True)
    with bench.ioctx() as ioctx:
        rbd.RBD().remove(ioctx, volume.id)
    assert await volume.read() == "kept", "of the parent, which has it still"
    await volume.leave()
    await first.leave()


async def _written(bench: Bench) -> Volume:
    """A raw volume with a text, not in use."""
    made = await bench.volume()
    await made.stage()
    await made.publish()
    await made.write("kept")
    await made.unpublish()
    await made.unstage()
    return made


async def test_node_that_was_switched_off_has_its_image_again_after_its_boot(bench: Bench) -> None:
    volume = await bench.volume()
    await volume.stage()
    await volume.publish()
    await volume.write("kept")
    before = volume.holders()
    await bench.close()
    await bench.vm.reset()
    await bench.prepare()
    assert volume.holders() == before
    await volume.stage()
    await volume.publish()
    assert await volume.read() == "kept"
    await volume.write("more")
    [holder] = volume.holders()
    assert holder.id != before[0].id
    assert [holder.address] == await volume.mapped()
    await volume.leave()
