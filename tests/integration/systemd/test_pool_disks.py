"""The pool's disk is lost, exchanged and restored under pods, on a node that systemd has booted: each block of
docs/pool-disk.md runs as it stands, with the path of a real device in place of DEVICE.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import pytest

from crust.host.block import loop
from crust.rpc import channel
from tests.integration.systemd.test_installed import SOCKET, follow
from tests.support import booted_systemd, capabilities
from tests.support.booted_systemd import Machine
from tests.support.co import Co
from tests.support.drivers import pools
from tests.support.faults.refusals import refused
from tests.support.forms.form import STAGING, TARGET
from tests.support.pages.page_blocks import blocks

pytestmark = pytest.mark.root
PAGE, POOL = "pool-disk.md", "/var/lib/crust/block"
RUN = {
    "systemctl stop crust-node\nlosetup": "test_lost_disk_is_replaced_by_a_new_one",
    "umount": "test_driver_serves_again_when_the_wrong_disk_is_gone",
    "rm": "test_other_disk_becomes_the_pool_and_pods_end",
    "mount --options ro": "test_writes_since_a_restore_under_pods_are_saved",
    "systemctl stop crust-node\n(umask": "test_backup_and_restore_of_the_whole_pool",
    "systemctl stop crust-node\nfind": "test_backup_and_restore_of_the_whole_pool",
}
"""By first words: the test that runs the block."""
NOT_RUN = {
    "kubectl label": "it needs a cluster",
    "python -m examples.backup SOCKET /var/lib/kubelet/backup DIRECTORY take": (
        "tests/integration/examples/test_backup.py runs it"
    ),
    "python -m examples.backup SOCKET /var/lib/kubelet/backup DIRECTORY restore": ("the same"),
}


def block(begins: str) -> list[str]:
    (found,) = [block for block in blocks(PAGE) if block.startswith(begins)]
    return found.splitlines()


def test_each_block_is_run_or_has_a_reason() -> None:
    for found in blocks(PAGE):
        assert sum(found.startswith(words) for words in (*RUN, *NOT_RUN)) == 1, found
    assert len(blocks(PAGE)) == len(RUN) + len(NOT_RUN)
    assert set(RUN.values()) <= set(globals())


class Node:
    """The machine, with its disks: files that loop devices make block devices of."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.output = machine.output
        self._disks = 0
        self.pool_ids: set[str] = set()
        """Of the pools that the node has had."""

    def disk(self) -> str:
        """The device of a new disk."""
        self._disks += 1
        file = f"/var/lib/crust-disk-{self._disks}"
        self.output("truncate", "--size=400M", file)
        return self.output("losetup", "--find", "--show", file).strip()

    def mounted(self) -> str:
        """A new disk, with a filesystem, at the pool's place."""
        device = self.disk()
        self.output("mkfs.ext4", "-q", device)
        self.output("mkdir", "--parents", POOL)
        self.output("mount", device, POOL)
        return device

    def run_block(self, begins: str, device: str = "") -> str:
        """Returns the output of the last command."""
        output = ""
        for line in block(begins):
            assert "DEVICE" not in line or device
            output = self.output("sh", "-c", line.replace("DEVICE", device))
        return output

    def detach(self) -> None:
        """All devices, of volumes and then of disks, after the power is off."""
        disks = (self.machine.root / "var/lib").glob("crust-disk-*")
        volumes = loop.list_named(lambda name: name.partition("-")[0] in self.pool_ids)
        for device in (*volumes, *(device for disk in disks for device in loop.find(disk))):
            loop.detach(device)

    async def until(self, shown: str) -> str:
        """What `crust drivers` prints as soon as it has this text."""
        async with asyncio.timeout(60):
            while shown not in (  # noqa: ASYNC110 - a Probe is all that tells
                output := (await asyncio.to_thread(self.machine.run, "crust", "drivers")).stdout
            ):
                await asyncio.sleep(0.1)
        return output

    def devices(self) -> list[str]:
        """The loop devices that the driver has attached."""
        listed = self.output("losetup", "--list", "--noheadings", "--output", "NAME,BACK-FILE")
        ours = rf"^(\S+) +\S*/({'|'.join(self.pool_ids)})-[0-9a-f]{{40}}\.img"
        return [name for name, _ in re.findall(ours, listed, re.MULTILINE)]


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """One for this file, with crust installed and serving, and a disk of its own for the pool."""
    capabilities.need("mount", "loop", "systemd")
    with booted_systemd.machine() as booted:
        node = Node(booted)
        try:
            node.mounted()
            follow(booted, "As units of systemd")
            yield node
        finally:
            booted.power_off()
            node.detach()


@asynccontextmanager
async def called(node: Node) -> AsyncIterator[Co]:
    async with channel.connect(f"{node.machine.root}{SOCKET}") as connected:
        yield Co(connected, waits=True)


async def published(node: Node, co: Co) -> str:
    """The id of a new volume, mounted for a pod."""
    for path in (STAGING, str(Path(TARGET).parent)):
        node.output("mkdir", "--parents", path)
    volume_id = (await co.create("v")).volume_id
    node.pool_ids.add(volume_id.partition("-")[0])
    await co.stage(volume_id, STAGING)
    await co.publish(volume_id, TARGET, defer=False, staging=STAGING)
    return volume_id


async def ended(co: Co, volume_id: str) -> None:
    """As the kubelet ends a pod."""
    await co.unpublish(volume_id, TARGET)
    await co.unstage(volume_id, STAGING)


@contextmanager
def another_nodes_volume(node: Node) -> Iterator[str]:
    """A loop device of a node that is a container on the same kernel: its pool has the same path."""
    file = f"{POOL}/another.img"
    makes = f"umount {POOL} && mount --bind /root {POOL} && truncate --size=1M {file}"
    script = f"{makes} && losetup --find --show {file} && cat"
    with node.machine.running("unshare", "--mount", "--wd=/", "sh", "-c", script) as other:
        assert other.stdout is not None
        device = other.stdout.readline().strip()
        try:
            yield device
        finally:
            node.output("losetup", "--detach", device)


async def test_lost_disk_is_replaced_by_a_new_one(node: Node) -> None:
    async with called(node) as co:
        volume_id = await published(node, co)
        pools.fail(Path(node.machine.seen(POOL)))
        assert "[PoolNotUsable]" in await node.until("PoolNotUsable")
        await ended(co, volume_id)
        assert node.devices() == []
        with another_nodes_volume(node) as device:
            begins = "systemctl stop crust-node\nlosetup"
            await asyncio.to_thread(node.run_block, begins, await asyncio.to_thread(node.disk))
            shown = node.output("losetup", "--noheadings", "--output=BACK-FILE", device)
            assert shown.startswith(POOL)
    async with called(node) as co:
        assert (await co.create("v")).volume_id != volume_id
        await refused(co.delete(volume_id), grpc.StatusCode.NOT_FOUND)


async def test_driver_serves_again_when_the_wrong_disk_is_gone(node: Node) -> None:
    async with called(node) as co:
        volume_id = await published(node, co)
        node.mounted()
        await node.until("PoolAbsent")
        await refused(co.unpublish(volume_id, TARGET), grpc.StatusCode.UNAVAILABLE)
        assert node.output("ls", POOL).split() == ["lost+found"]
        assert node.devices() != []
        await asyncio.to_thread(node.output, "sh", "-c", "; ".join(block("umount")[:1]))
        await node.until(" ready ")
        await ended(co, volume_id)
        await co.delete(volume_id)


async def test_other_disk_becomes_the_pool_and_pods_end(node: Node) -> None:
    async with called(node) as co:
        volume_id = await published(node, co)
        node.mounted()
        await node.until("PoolAbsent")
        *lines, _ = block("rm")
        for line in lines:
            await asyncio.to_thread(node.output, "sh", "-c", line)
        await node.until(" ready ")
        await ended(co, volume_id)
        assert node.devices() == []
        assert (await co.create("v")).volume_id != volume_id


async def test_writes_since_a_restore_under_pods_are_saved(node: Node) -> None:
    async with called(node) as co:
        volume_id = await published(node, co)
        image = f"{POOL}/volumes/{volume_id}/{volume_id}.img"
        node.output("cp", "--sparse=always", image, "/root/backup.img")
        node.output("cp", "--sparse=always", "/root/backup.img", f"{image}.new")
        node.output("mv", f"{image}.new", image)
        (device,) = node.devices()
        assert f"{device} has the earlier file" in node.machine.run("crust", "pool").stdout
        node.output("sh", "-c", f"echo later >{TARGET}/later; sync {TARGET}/later")
        await co.unpublish(volume_id, TARGET)
        await refused(co.unstage(volume_id, STAGING), grpc.StatusCode.DATA_LOSS)
        await asyncio.to_thread(node.run_block, "mount --options ro", device)
        assert node.output("cat", "/root/saved/later") == "later\n"
        await co.unstage(volume_id, STAGING)
        await co.stage(volume_id, STAGING)
        await co.publish(volume_id, TARGET, defer=False, staging=STAGING)
        assert "later" not in node.output("ls", TARGET)
        await ended(co, volume_id)
        await co.delete(volume_id)


def test_backup_and_restore_of_the_whole_pool(node: Node) -> None:
    node.output("touch", f"{POOL}/kept")
    node.run_block("systemctl stop crust-node\n(umask")
    mode = node.output("stat", "--format=%a", "/root/crust-pool.tar").strip()
    assert mode == "600", "it has the data of all volumes"
    listed = node.output("tar", "--list", "--file", "/root/crust-pool.tar").split()
    assert "./block/pool.json" in listed
    pool_id = node.output("cat", f"{POOL}/pool.json")
    node.output("sh", "-c", f"touch {POOL}/made-since; rm {POOL}/kept")
    node.run_block("systemctl stop crust-node\nfind")
    assert node.output("cat", f"{POOL}/pool.json") == pool_id
    assert "kept" in node.output("ls", POOL).split()
    assert "made-since" not in node.output("ls", POOL)
