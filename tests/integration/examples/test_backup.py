"""The backup of docs/pool-disk.md: a full one, an increment and a restore, while a process writes to the volume."""

import asyncio
import hashlib
import os
import sys
from asyncio.subprocess import PIPE, Process, create_subprocess_exec
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from crust.blockdriver import serve
from crust.blockdriver.driver import build
from crust.blockdriver.engines import files
from crust.rpc import channel
from tests.support.co import MIB, Co, capability
from tests.support.drivers import pools, remnants
from tests.support.pages.page_blocks import blocks
from tests.support.records import pool_layout

pytestmark = pytest.mark.root
SIZE = 320 * MIB
WRITER = """
import os, random, sys
with open(sys.argv[1], "w+b") as file:
    while True:
        file.seek(random.randrange(4096) * 4096)
        file.write(os.urandom(4096))
        file.flush()
        os.fsync(file.fileno())
        print("written", flush=True)
"""


class Node:
    """A driver on a socket, and the directories of its kubelet."""

    def __init__(self, root: Path, co: Co) -> None:
        self.root, self.co = root, co
        for name in ("staging", "pod", "backups"):
            (root / name).mkdir()
        self.staging, self.target = f"{root}/staging", f"{root}/pod/mount"

    async def up(self, volume_id: str) -> None:
        await self.co.stage(volume_id, self.staging, capability())
        await self.co.publish(
            volume_id, self.target, capability(), defer=False, staging=self.staging
        )

    async def down(self, volume_id: str) -> None:
        await self.co.unpublish(volume_id, self.target)
        await self.co.unstage(volume_id, self.staging)

    async def begun(self, word: str, **given: object) -> Process:
        """The page's command with this word, which runs; `given` has what stands in its place."""
        (line,) = [block for block in blocks("pool-disk.md") if f"DIRECTORY {word} " in block]
        places = {"SOCKET": "csi.sock", "DIRECTORY": "backups", "/var/lib/kubelet/backup": "work"}
        at = {place: f"{self.root}/{name}" for place, name in places.items()} | given
        argv = [str(at.get(part, part)) for part in line.split()[1:]]
        return await create_subprocess_exec(sys.executable, *argv, stdout=PIPE)

    async def run(self, word: str, **given: object) -> str:
        """What such a command prints."""
        process = await self.begun(word, **given)
        output, _ = await process.communicate()
        assert process.returncode == 0
        return output.decode().strip()


@pytest.fixture(params=["xfs", "btrfs"])
async def node(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Node]:
    with pools.mounted(request.param, tmp_path, tmp_path / "state", size=3072 * MIB):
        run_dir, socket = f"{tmp_path}/run", f"{tmp_path}/csi.sock"
        driver = build(
            engine=files.engine(f"{tmp_path}/state", create=True),
            run_dir=run_dir,
            node_id="n",
            target_roots=(str(tmp_path),),
        )
        try:
            async with (
                serve.running(driver, socket=socket, run_dir=run_dir),
                channel.connect(socket) as connected,
            ):
                yield Node(tmp_path, Co(connected))
        finally:
            remnants.remove(tmp_path, keep=f"{tmp_path}/state")


@asynccontextmanager
async def writing(target: str) -> AsyncIterator[asyncio.StreamReader]:
    """A process writes at random to a file of the volume while the block runs, and says so of each write."""
    process = await create_subprocess_exec(
        sys.executable, "-c", WRITER, f"{target}/database", stdout=PIPE
    )
    assert process.stdout is not None
    try:
        yield process.stdout
    finally:
        process.kill()
        await process.communicate()


def kept(target: str, name: str, data: bytes) -> str:
    """The digest of a new file."""
    Path(target, name).write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@pytest.mark.parametrize("node", ["xfs"], indirect=True)
async def test_backup_with_a_gap_restores_nothing(node: Node) -> None:
    volume_id = (await node.co.create("db", size=SIZE)).volume_id
    await node.up(volume_id)
    kept(node.target, "before", b"full" * MIB)
    full = Path(await node.run("take", VOLUME=volume_id, SIZE=SIZE))
    await node.down(volume_id)
    whole = full.read_bytes()
    full.write_bytes(whole[:-1])
    process = await node.begun("restore", NAME="restored")
    await process.communicate()
    assert process.returncode == 1
    assert list(await node.co.volumes()) == [volume_id]
    full.rename(full.with_name("0001.backup"))
    process = await node.begun("take", VOLUME=volume_id, SIZE=SIZE)
    await process.communicate()
    assert process.returncode == 1
    assert full.with_name("0001.backup").read_bytes() == whole[:-1]


async def test_restored_volume_has_the_last_snapshot_of_a_written_volume(node: Node) -> None:
    volume_id = (await node.co.create("db", size=SIZE)).volume_id
    await node.up(volume_id)
    unchanged = os.urandom(4 * MIB)
    wanted = {"before": kept(node.target, "before", unchanged)}
    async with writing(node.target) as written:
        await written.readline()
        full = Path(await node.run("take", VOLUME=volume_id, SIZE=SIZE))
        await written.readuntil(b"written\n")
        wanted["since"] = kept(node.target, "since", b"increment" * 1000)
        increment = Path(await node.run("take", VOLUME=volume_id, SIZE=SIZE))
        await written.readuntil(b"written\n")
    Path(node.target, "later").touch()
    await node.down(volume_id)
    part = unchanged[MIB : MIB + 4096]
    assert part in full.read_bytes()
    assert part not in increment.read_bytes()
    [snapshot_id] = await node.co.snapshots()
    restored = await node.run("restore", NAME="restored")
    state = node.root / "state"
    assert digest(pool_layout.image(state, restored)) == digest(
        pool_layout.snapshot_image(state, snapshot_id)
    )
    await node.up(restored)
    assert {name: digest(Path(node.target, name)) for name in wanted} == wanted
    assert not Path(node.target, "later").exists()
    await node.down(restored)
    again = await node.begun("restore", NAME="restored")
    await again.communicate()
    assert again.returncode == 1
    await node.up(restored)
    assert {name: digest(Path(node.target, name)) for name in wanted} == wanted
    await node.down(restored)
    assert set(await node.co.volumes()) == {volume_id, restored}
    assert not (node.root / "work").exists()


async def test_next_run_finishes_what_a_killed_one_began(node: Node) -> None:
    volume_id = (await node.co.create("db", size=SIZE)).volume_id
    await node.up(volume_id)
    await node.down(volume_id)
    part = node.root / "backups" / "0000.part"
    os.mkfifo(part)  # it takes less than a backup
    process = await node.begun("take", VOLUME=volume_id, SIZE=SIZE)
    reading = await asyncio.to_thread(os.open, part, os.O_RDONLY)
    assert await asyncio.to_thread(os.read, reading, 1)
    process.kill()
    await process.communicate()
    os.close(reading)
    part.unlink()
    assert len(await node.co.volumes()) == 2
    await node.run("take", VOLUME=volume_id, SIZE=SIZE)
    assert set(await node.co.volumes()) == {volume_id}
    assert len(await node.co.snapshots()) == 1
    assert not (node.root / "work").exists()
