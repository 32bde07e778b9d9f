"""The pool's disk comes and goes under a driver that serves: nothing is answered or written in its place."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import pytest
from click.testing import CliRunner

from crust.blockdriver import serve
from crust.blockdriver.driver import build
from crust.blockdriver.engines import files
from crust.blockdriver.engines.files.pool import DirectoryPool
from crust.cli import main
from crust.core import metrics
from crust.core.settings import OWN_DRIVER
from crust.host.mounts import mount_api, mountinfo
from crust.rpc import channel
from crust.rpc.serving.daemon import Daemon
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import Co
from tests.support.records import pool_layout

POOL = f"pool of {OWN_DRIVER}"

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("strict_event_loop")]


@dataclass
class Node:
    """A node whose pool is a mount that comes and goes; `state` is the mount point."""

    root: Path
    daemon: Daemon = field(init=False)
    co: Co = field(init=False)

    @property
    def state(self) -> Path:
        return self.root / "state"

    def mount(self, disk: str, folder: str = "") -> None:
        """Have the disk at the mount point or a folder below it, above what is mounted there."""
        subprocess.run(["mount", "--bind", self.root / disk, self.state / folder], check=True)

    async def until(self, *, ready: bool) -> None:
        async with asyncio.timeout(60):
            while await self.co.is_ready() != ready:  # noqa: ASYNC110 - a Probe is all that tells
                await asyncio.sleep(0.05)

    async def refused(self) -> str:
        """The reason with which every call that needs the pool is refused."""
        co, reasons = self.co, set()
        for call in (
            co.create("v"),
            co.delete("0123456789abcdef-" + "0" * 40),
            co.volumes(),
            co.capacity(),
            co.unpublish("v", "/a"),
            co.node.NodeGetInfo(csi_pb2.NodeGetInfoRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            reasons.add(caught.value.details() or "")
        (reason,) = reasons
        assert str(self.daemon.health.problems[POOL]) in reason
        assert metrics.pool_open.labels(OWN_DRIVER)._value.get() == 0
        return reason


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[Path]:
    """`ours`, a disk with a pool; `other`, one without; and the mount point, on the root disk."""
    for name in ("ours", "other", "state"):
        (tmp_path / name).mkdir()
    subprocess.run(["mount", "--bind", tmp_path / "ours", tmp_path / "state"], check=True)
    arguments = ["driver", "init-pool", f"--state-dir={tmp_path}/state"]
    made = CliRunner().invoke(main.main, arguments)
    assert made.exit_code == 0, made.output
    assert CliRunner().invoke(main.main, arguments).output == made.output
    subprocess.run(["umount", tmp_path / "state"], check=True)
    again = CliRunner().invoke(main.main, arguments)
    assert again.exit_code == 1
    assert "PoolAbsent" in again.output
    try:
        yield tmp_path
    finally:
        for mounted in reversed(mountinfo.below(str(tmp_path))):
            mount_api.unmount(mounted.target)


@asynccontextmanager
async def running(node: Node, *, create_pool: bool = False) -> AsyncIterator[Node]:
    """The node's driver serves while the block runs."""
    run_dir, socket = f"{node.root}/run", f"{node.root}/csi.sock"
    driver = build(
        engine=files.engine(str(node.state), create=create_pool),
        run_dir=run_dir,
        node_id="n",
        target_roots=(str(node.root),),
    )
    async with (
        serve.running(driver, socket=socket, run_dir=run_dir) as node.daemon,
        channel.connect(socket) as connected,
    ):
        node.co = Co(connected)
        yield node


@pytest.mark.parametrize("create_pool", [False, True])
async def test_pool_whose_disk_is_mounted_later_is_opened_without_restart(
    disks: Path, *, create_pool: bool
) -> None:
    async with running(Node(disks), create_pool=create_pool) as node:
        assert not await node.co.is_ready()
        assert "perhaps its disk is not mounted" in await node.refused()
        assert not any(node.state.iterdir())
        node.mount("ours")
        await node.until(ready=True)
        assert POOL not in node.daemon.health.problems
        assert metrics.pool_open.labels(OWN_DRIVER)._value.get() == 1
        created = await node.co.create("v")
    assert pool_layout.image(disks / "ours", created.volume_id).exists()


@pytest.mark.parametrize("folder", ["", *pool_layout.FOLDERS[:2]])
async def test_disk_over_pool_or_folder_is_noticed_and_not_written(
    disks: Path, folder: str
) -> None:
    """Volumes would seem to be deleted, or their images lost. The driver serves again when it is gone, with all."""
    node = Node(disks)
    node.mount("ours")
    async with running(node):
        known = {(await node.co.create("v")).volume_id}
        node.mount("other", folder)
        # whatever comes before the driver has looked is done on the right disk, or refused
        with suppress(grpc.aio.AioRpcError):
            late_id = (await node.co.create("late")).volume_id
            assert pool_layout.image(disks / "ours", late_id).exists()
            known.add(late_id)
        await node.until(ready=False)
        assert (str(node.state / folder) if folder else "is not in") in await node.refused()
        assert not any((disks / "other").iterdir())
        assert pool_layout.volume_records(disks / "ours") == known
        mount_api.unmount_one(str(node.state / folder))
        await node.until(ready=True)
        assert (await node.co.create("v")).volume_id in known
        assert set(await node.co.volumes()) == known


@pytest.mark.parametrize("folder", pool_layout.FOLDERS)
async def test_pool_with_mount_over_folder_is_not_opened(disks: Path, folder: str) -> None:
    node = Node(disks)
    node.mount("ours")
    node.mount("other", folder)
    async with running(node):
        assert not await node.co.is_ready()
        assert f"{node.state / folder} is a mount point" in await node.refused()
        assert not any((disks / "other").iterdir())
        mount_api.unmount_one(str(node.state / folder))
        await node.until(ready=True)


async def test_absent_pool_is_closed_so_its_disk_can_be_repaired(disks: Path) -> None:
    node = Node(disks)
    node.mount("ours")

    def held() -> set[str]:
        folders = (path for path in (disks / "ours").iterdir() if path.is_dir())
        locks = (disks / "ours").glob("*.lock")
        statuses = [path.stat() for path in (disks / "ours", *folders, *locks)]
        ours = {(status.st_dev, status.st_ino) for status in statuses}
        descriptors = set()
        for descriptor in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):  # the listing's own
                status = os.stat(f"/proc/self/fd/{descriptor}")
                if (status.st_dev, status.st_ino) in ours:
                    descriptors.add(descriptor)
        return descriptors

    before = held()
    async with running(node):
        assert held() - before
        node.mount("other")
        await node.until(ready=False)
        # Calls are refused first, so that what runs can end; what it holds is closed after that.
        async with asyncio.timeout(60):
            while held() - before:  # noqa: ASYNC110 - only the descriptors tell
                await asyncio.sleep(0.05)


async def test_another_pool_in_place_of_nodes_own_is_not_served(disks: Path) -> None:
    other = Node(disks)
    other.mount("other")
    made = DirectoryPool(str(other.state), f"{disks}/elsewhere", create=True)
    await asyncio.to_thread(made.open)
    pool_id = made.ids.pool_id
    await asyncio.to_thread(made.let_go)
    async with running(other, create_pool=True) as node:
        assert f"the pool {pool_id} is there" in await node.refused()
