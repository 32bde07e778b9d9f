"""The pod of the chart on a node, when the pool's disk is absent, mounted, exchanged, backed up and restored."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.integration.containers.conftest import ANSWER_S, CAPABILITY, Pods
from tests.support import chart
from tests.support.co import Co
from tests.support.containers import Container, Containerd
from tests.support.faults.refusals import refused
from tests.support.forms.form import KUBELET, TARGET, Volume, staged
from tests.support.forms.pod import Pod, serving
from tests.support.pages.page_blocks import blocks

pytestmark = pytest.mark.root

BUSY = 32
"""umount's exit status for a mount that is in use."""


@pytest.fixture
def at(pods: Pods) -> Iterator[Path]:
    """Where the pool's disk is mounted; the mounts of the node are shared, as under systemd."""
    pool = pods.root / "pool"
    for options in (("-t", "tmpfs", "tmpfs"), ("--make-shared",)):
        subprocess.run(["mount", *options, pool], check=True)
    (pool / "block").mkdir()
    try:
        yield pool / "block"
    finally:
        pods.containerd.remove_all()
        subprocess.run(["umount", "--recursive", pool], check=True)


def disk(pods: Pods, name: str) -> Path:
    path = pods.root / name
    with path.open("wb") as file:
        file.truncate(256 << 20)
    subprocess.run(["mkfs.ext4", "-q", path], check=True)
    return path


def mount(path: Path, at: Path) -> None:
    subprocess.run(["mount", "-o", "loop", path, at], check=True)


def umount(at: Path) -> int:
    return subprocess.run(["umount", at], check=False, capture_output=True).returncode


async def started(pods: Pods) -> Container:
    pod = pods.rendered(chart.choice("local"))
    container = await asyncio.to_thread(pod.start, pods.containerd)
    await asyncio.to_thread(container.wait_for, "proxy serves")
    return container


async def refuses_for_the_pool(pods: Pods) -> None:
    """The driver answers the kubelet; what needs the pool is refused by name."""
    async with channel.connect(pods.places.csi) as connected:
        identity = csi_pb2_grpc.IdentityStub(connected)
        info = await identity.GetPluginInfo(csi_pb2.GetPluginInfoRequest(), timeout=ANSWER_S)
        assert info.name == "block.csi.crust.dev"
        create = Co(connected, ANSWER_S).create("v-1", CAPABILITY)
        await refused(create, grpc.StatusCode.UNAVAILABLE, "PoolAbsent")


async def test_disk_of_serving_pod_cannot_be_unmounted(pods: Pods, kubelet: Path, at: Path) -> None:
    """Else the disk could be taken out, or another one mounted, under a driver that says ready."""
    mount(disk(pods, "disk"), at)
    container = await started(pods)
    await asyncio.to_thread(container.wait_for, "pool opened")
    assert (at / "pool.json").exists()
    assert umount(at) == BUSY
    await asyncio.to_thread(container.kill, "TERM")
    assert umount(at) == 0


async def test_pod_without_its_disk_serves_and_opens_only_that_one(
    pods: Pods, kubelet: Path, at: Path
) -> None:
    own, other = disk(pods, "disk"), disk(pods, "other")
    mount(own, at)
    container = await started(pods)
    await asyncio.to_thread(container.wait_for, "pool opened")
    await asyncio.to_thread(container.kill, "TERM")
    assert umount(at) == 0

    container = await started(pods)
    await refuses_for_the_pool(pods)
    mount(other, at)
    await refuses_for_the_pool(pods)
    assert umount(at) == 0
    assert not (at / "pool.json").exists()
    mount(own, at)
    await asyncio.to_thread(container.wait_for, "pool opened")
    assert umount(at) == BUSY
    await asyncio.to_thread(container.kill, "TERM")
    assert umount(at) == 0


async def test_pool_of_a_pod_is_backed_up_restored_and_left(containerd: Containerd) -> None:
    """By the pages: docs/pool-disk.md, and step 3 of "Uninstall" in docs/kubernetes.md."""
    with serving(containerd, chart.choice("local"), Pod) as node:
        async with staged(node) as volume:
            await volume.unstage()
            assert await written(node, volume, "kept") == "kept\n"
            await follow(node, "systemctl stop crust-node\n(umask")
            assert await written(node, volume, "later") == "kept\nlater\n"
            await follow(node, "systemctl stop crust-node\nfind")
            assert await written(node, volume, "again") == "kept\nagain\n"
            await volume.stage()
        await asyncio.to_thread(node.containers["crust-node"].kill, "TERM")
        for directory in (f"plugins/{node.driver}", "plugins_registry"):
            assert node.output("ls", "--almost-all", f"{KUBELET}/{directory}") == ""
        assert not node.is_mounted()
        node.serve("crust-node")


async def written(node: Pod, volume: Volume, line: str) -> str:
    """What the volume has after a pod's line."""
    await volume.stage()
    await volume.publish(defer=False)
    text = node.output("sh", "-c", f"echo {line} >>{TARGET}/lines; cat {TARGET}/lines")
    await volume.unpublish()
    await volume.unstage()
    return text


async def follow(node: Pod, begins: str) -> None:
    """A block of the page, whose `systemctl` is for pods the end and the start of the node's pod."""
    (block,) = (block for block in blocks("pool-disk.md") if block.startswith(begins))
    for line in block.splitlines():
        if line == "systemctl stop crust-node":
            await asyncio.to_thread(node.containers["crust-node"].kill, "TERM")
        elif line == "systemctl start crust-node":
            await asyncio.to_thread(node.serve, "crust-node")
            await asyncio.to_thread(node.containers["crust-node"].wait_for, "proxy serves")
        elif line.startswith("crust "):
            done = node.crust(*line.split()[1:])
            assert done.returncode == 0, done
        else:
            node.output("sh", "-c", line)
