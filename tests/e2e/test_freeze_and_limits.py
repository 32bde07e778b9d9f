"""Freeze, thaw and I/O limits on a whole node, called through the proxy's Runtime API and by the driver.

One node for the file; each test has volumes and sandboxes of its own.
"""

import asyncio
import hashlib
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from crust.core import volumes
from crust.handoff import store
from crust.wire.csi.v1 import csi_pb2
from tests.support import processes
from tests.support.faults.refusals import refused, repeated
from tests.support.nodes.whole_node import MIB, WholeNode
from tests.support.runtimes import runtime_api
from tests.support.runtimes.guest_writer import writing

pytestmark = [pytest.mark.vm, pytest.mark.asyncio(loop_scope="module")]

# By rename, so that a crash never leaves a truncated number.
WRITER = """
i=0
while :; do
    i=$((i+1)); echo $i > /data/next; cp /data/next /data/f$((i%9)); mv /data/next /data/n; sync; echo $i
done
"""
LIMITS = volumes.IoLimits(500, 400, 30 * MIB, 20 * MIB)


@pytest_asyncio.fixture(loop_scope="module")
async def api(node: WholeNode) -> AsyncIterator[runtime_api.RuntimeApi]:
    async with runtime_api.connected(node) as api:
        yield api


def image_of(node: WholeNode, volume: csi_pb2.Volume) -> Path:
    (image,) = (node.daemons.paths.base / "pool").rglob(f"{volume.volume_id}.img")
    return image


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def test_image_of_frozen_guest_does_not_change_until_thaw(
    node: WholeNode, api: runtime_api.RuntimeApi, tmp_path: Path
) -> None:
    volume = await node.volume()
    target = await node.publish(volume)
    assert await api.freeze(target, 60) is False, "no sandbox, nothing to hold"
    image = image_of(node, volume)
    async with writing(node, WRITER, {"/data": target}) as writer:
        moving = await asyncio.to_thread(digest, image)
        await writer.next_round()
        assert await asyncio.to_thread(digest, image) != moving, "or equality proves nothing"
        assert await api.freeze(target, 60) is True
        first = await asyncio.to_thread(digest, image)
        copy = tmp_path / "copy"
        await asyncio.to_thread(
            subprocess.run, ["cp", "--sparse=always", str(image), str(copy)], check=True
        )
        checked = await asyncio.to_thread(
            subprocess.run, ["e2fsck", "-fn", str(copy)], check=False, capture_output=True
        )
        assert checked.returncode == 0, checked
        assert (await node.kubelet.stats(volume, target))[csi_pb2.VolumeUsage.BYTES].used > 0
        ending = node.kubelet.unpublish(volume, target)
        await refused(ending, grpc.StatusCode.FAILED_PRECONDITION, "one")
        growing = asyncio.create_task(node.kubelet.expand(volume, target, 128 * MIB))
        assert await asyncio.to_thread(digest, copy) == first
        assert await api.thaw(target) is True
        assert await growing == 128 * MIB
        await writer.next_round()
        assert await api.thaw(target) is False


async def test_frozen_guest_thaws_by_itself_and_thaw_reports_it(
    node: WholeNode, api: runtime_api.RuntimeApi
) -> None:
    """A VM killed while frozen loses nothing that was written before."""
    target = await node.publish(await node.volume())
    async with writing(node, WRITER, {"/data": target}) as writer:
        assert await api.freeze(target, 3) is True
        await writer.next_round()
        assert await api.thaw(target) is False
        assert await api.freeze(target, 60) is True
        await asyncio.to_thread(processes.end, await node.qemu_pid("one"))
        # the runtime has not noticed yet that the VM is gone
        gone = grpc.StatusCode.UNAVAILABLE
        assert await repeated(lambda: api.thaw(target), gone) is False
        assert await repeated(lambda: api.freeze(target, 60), gone) is False
    assert int(await node.output("two", target, "cat /data/n")) >= writer.rounds


async def test_limits_apply_to_running_and_next_sandbox(
    node: WholeNode, api: runtime_api.RuntimeApi
) -> None:
    volume = await node.volume()
    target = await node.publish(volume)
    await node.output("one", target, "true")
    assert await runtime_api.limits_in_force(node) == {}
    assert await api.limit(target, LIMITS) is True
    assert await runtime_api.limits_in_force(node) == {str(target): LIMITS}
    await node.runtime.stop("one")
    fewer = volumes.IoLimits(write_bytes_per_second=5 * MIB)
    assert await api.limit(target, fewer) is False
    # a retry does not bring the driver's older limits
    await node.kubelet.publish(volume, target, defer=True)
    entry = store.Store(str(node.daemons.paths.volumes)).read(volumes.TargetPath(str(target)))
    assert entry is not None
    assert entry.require().mount.io_limits == fewer
    await node.output("two", target, "true")
    assert await runtime_api.limits_in_force(node) == {str(target): fewer}
    assert await api.limit(target, volumes.IoLimits()) is True
    assert await runtime_api.limits_in_force(node) == {}
