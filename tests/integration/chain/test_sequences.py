"""Sequences of calls, failures and restarts: never two kernels on a volume, never a write to the node's disk, never
stuck.

Each test ends with the volume deleted and nothing left, without any manual step that is not the test's subject.
"""

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from crust.core import volumes
from crust.core.volumes import HandlerFeature
from crust.handoff import layout
from crust.host.block import loop
from crust.host.mounts import mount_api
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import MIB, capability
from tests.support.faults.refusals import refused
from tests.support.memory_csi.node import Mounts
from tests.support.nodes.fake_node import node_on
from tests.support.nodes.places import Places
from tests.support.nodes.served_node import BlockNode
from tests.support.runtimes.fake_handler import ALL_FEATURES

pytestmark = pytest.mark.root
Code = grpc.StatusCode


async def test_deferral_is_switched_between_pods_and_the_data_stays(chain: BlockNode) -> None:
    volume = await chain.volume()
    guest, host = chain.places.target("guest"), chain.places.target("host")
    for round_ in ("first", "second"):
        await chain.publish(volume, guest)
        await refused(chain.publish(volume, host, defer=False), Code.FAILED_PRECONDITION, guest)
        with chain.sandbox(guest) as device:
            mounted = await asyncio.to_thread(
                subprocess.run,
                ["mount", device, chain.staging("try")],
                capture_output=True,
                check=False,
            )
            assert mounted.returncode != 0, "the sandbox holds the device exclusively"
        await chain.unpublish(volume, guest)
        await chain.publish(volume, host, defer=False)
        await refused(chain.publish(volume, guest), Code.FAILED_PRECONDITION, host)
        Path(host, round_).write_text("kept")
        await chain.unpublish(volume, host)
    await chain.publish(volume, host, defer=False)
    assert {"first", "second"} <= set(os.listdir(host))


@pytest.mark.parametrize("consent", [{}, {"crust.dev/grow-in": "host"}], ids=["no", "yes"])
async def test_expansion_whose_size_nobody_would_use_is_refused(
    chain: BlockNode, consent: dict[str, str]
) -> None:
    """Before the image grows: by what the proxy has said of the handler at the publish."""
    context = {"crust.dev/defer": "always", "crust.dev/runtime-handler": "small", **consent}
    volume, target = await chain.volume(parameters=context), chain.places.target("one")
    features = ALL_FEATURES - {HandlerFeature.GROW}
    endpoint = f"{chain.places.root}/small.sock"
    async with chain.handler(name="small", features=features, endpoint=endpoint):
        await chain.publish(volume, target, context=context, defer=False)
    if consent:
        assert (await chain.co.grow(volume, 80 * MIB)).capacity_bytes == 80 * MIB
        return
    assert (await chain.co.grow(volume, 64 * MIB)).capacity_bytes == 64 * MIB
    await refused(
        chain.co.grow(volume, 80 * MIB), Code.INVALID_ARGUMENT, "NobodyGrowsFilesystem", "grow-in"
    )
    assert (await chain.co.grow(volume, 64 * MIB)).capacity_bytes == 64 * MIB


async def test_every_daemon_restarts_with_a_live_sandbox(chain: BlockNode) -> None:
    volume = await chain.volume()
    target, other = chain.places.target("one"), chain.places.target("two")
    await chain.publish(volume, target)
    with chain.sandbox(target):
        await chain.restart()
        await refused(chain.unpublish(volume, target), Code.FAILED_PRECONDITION, "box-1")
        await refused(chain.publish(volume, other), Code.FAILED_PRECONDITION, target)
        await refused(chain.publish(volume, other, defer=False), Code.FAILED_PRECONDITION, target)
        await refused(chain.unstage(volume), Code.FAILED_PRECONDITION, target)
        await chain.publish(volume, target)


@pytest.mark.parametrize("guarded", [True, False])
async def test_handoff_directory_lost_under_a_sandbox(chain: BlockNode, *, guarded: bool) -> None:
    """Only the kernel still has the claim: the exclusive hold of the device lasts, and nothing is detached."""
    volume, target = await chain.published_volume()
    with chain.sandbox(target):
        await chain.stop()
        shutil.rmtree(chain.places.volumes)
        if not guarded:
            mount_api.unmount(target)
        await chain.start()
        await chain.unpublish(volume, target)
        assert not os.path.lexists(target), "CSI NodeUnpublishVolume: the target is removed"
        await refused(chain.unstage(volume), Code.FAILED_PRECONDITION)
        await refused(chain.publish(volume, target), Code.FAILED_PRECONDITION)
        await refused(chain.publish(volume, target, defer=False), Code.FAILED_PRECONDITION)


async def test_run_and_devices_are_lost_as_in_a_reboot(chain: BlockNode) -> None:
    volume, target = await chain.published_volume()
    await chain.stop()
    mount_api.unmount(target)
    for device in loop.list_named(lambda _: True):
        if volume in device.backing:
            loop.detach(device)
    for lost in (chain.places.volumes, f"{chain.places.root}/driver-run"):
        shutil.rmtree(lost)
    await chain.start()
    # A kubelet cleans up pods that are gone, and stages and publishes for those that come back.
    await chain.unpublish(volume, target)
    await chain.unstage(volume)
    await chain.stage(volume)
    await chain.publish(volume, target)
    with chain.sandbox(target):
        await refused(chain.unpublish(volume, target), Code.FAILED_PRECONDITION, "box-1")


async def test_second_staging_path_comes_and_goes_while_deferred(chain: BlockNode) -> None:
    volume, target = await chain.published_volume()
    await chain.stage(volume, "second")
    await refused(chain.unstage(volume, "second"), Code.FAILED_PRECONDITION, target)
    with chain.sandbox(target) as device:
        assert os.path.exists(device)
    await chain.unpublish(volume, target)
    await chain.unstage(volume, "second")
    await chain.publish(volume, target)


async def test_full_run_directory_stops_no_unpublish(chain: BlockNode) -> None:
    await chain.stop()
    await asyncio.to_thread(
        subprocess.run,
        ["mount", "-t", "tmpfs", "-o", "size=128k,mode=0700", "tmpfs", chain.places.run],
        check=True,
    )
    await chain.start()
    volume = await chain.volume()
    one = chain.places.target("one")
    ballast = Path(chain.places.run, "ballast")
    await _fill(ballast)
    await refused(chain.publish(volume, one), Code.RESOURCE_EXHAUSTED)
    assert not os.path.lexists(one)
    ballast.unlink()
    await chain.publish(volume, one)
    await _fill(ballast)
    await chain.publish(volume, one)
    await chain.unpublish(volume, one)
    ballast.unlink()


async def _fill(path: Path) -> None:
    def fill() -> None:
        with path.open("wb", buffering=0) as file:
            for size in (4096, 1):
                try:
                    while file.write(b"x" * size):
                        pass
                except OSError:
                    continue

    await asyncio.to_thread(fill)


async def test_unreadable_record_blocks_its_volume_until_its_hint_is_followed(
    chain: BlockNode,
) -> None:
    volume = await chain.volume()
    target, other = chain.places.target("one"), chain.places.target("two")
    await chain.publish(volume, target)
    path = Path(layout.Layout(chain.places.volumes).entry(volumes.TargetPath(target)).record)
    path.write_text("{")
    await chain.restart()
    await refused(chain.unpublish(volume, target), Code.DATA_LOSS, str(path))
    entry = str(path.parent)
    await refused(chain.publish(volume, other), Code.FAILED_PRECONDITION, entry)
    await refused(chain.publish(volume, other, defer=False), Code.FAILED_PRECONDITION, entry)
    await refused(chain.unstage(volume), Code.FAILED_PRECONDITION, entry)
    path.unlink()
    await chain.restart()
    await chain.unpublish(volume, target)
    shutil.rmtree(path.parent, ignore_errors=True)


async def test_a_hypervisor_that_is_killed_frees_the_volume_at_once(chain: BlockNode) -> None:
    volume, target = await chain.published_volume()
    with chain.sandbox(target):
        pass
    script = (
        "import sys; from crust.runtime_handler.blocking import claim_volume as c; "
        "from crust.core import volumes as v; "
        "h = c(sys.argv[1], v.TargetPath(sys.argv[2]), v.SandboxId('vm'), v.HandlerName('kata')); "
        "print('has it', flush=True); sys.stdin.read()"
    )
    vm = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, chain.places.volumes, target),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert vm.stdout is not None
    assert await vm.stdout.readline() == b"has it\n"
    await refused(chain.unpublish(volume, target), Code.FAILED_PRECONDITION, "vm")
    vm.kill()
    await vm.wait()


class DeviceNodes(Mounts):
    """A raw publish binds the device's node."""

    def __init__(self, device: str) -> None:
        self._device = device

    def publish(self, request: csi_pb2.NodePublishVolumeRequest) -> None:
        if request.volume_capability.HasField("block"):
            Path(request.target_path).touch()
            mount_api.bind(self._device, request.target_path)
            if request.readonly:
                options = ("-o", "remount,bind,ro")
                subprocess.run(["mount", *options, request.target_path], check=True)


async def test_raw_publish_of_an_earlier_proxy_is_seen(
    places: Places, ext4_device: loop.LoopDevice
) -> None:
    raw = f"{places.kubelet}/plugins/kubernetes.io/csi/volumeDevices/publish/pv-1/uid-1"
    os.makedirs(os.path.dirname(raw))
    target, block = places.target("one"), capability(block=True)
    for began in (False, True):
        async with (
            node_on(ext4_device.path, places, DeviceNodes(ext4_device.path)) as node,
            node.handler(),
        ):
            if began:
                await refused(node.co.publish("vol-2", target), Code.FAILED_PRECONDITION, raw)
                await node.co.publish("vol-2", target, readonly=True)
                await node.co.unpublish("vol-2", target)
            else:
                await node.co.publish("vol-1", raw, block, defer=False, readonly=True)
