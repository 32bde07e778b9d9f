"""The random lifecycle of one volume, made by a seed: what is synced into it is remembered and verified.

The choices follow from the seed; how the calls of many lives meet one another, and the driver's deaths, does not.
"""

import asyncio
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from crust.blockdriver.controller.class_parameters import POOL
from crust.blockdriver.settings import DEFAULT_POOL
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import encoded
from tests.support.drivers.block_driver import MIB, block, mount
from tests.support.drivers.killed_driver import RetryingCo

NODE = "node-1"
_SIZES = {"ext4": 32 * MIB, "xfs": 304 * MIB, "": 32 * MIB}
_MORE = 16 * MIB
_CHUNK = 64 * 1024
_FILE = "diary"


@dataclass(slots=True)
class Volume:
    """A volume and its expected content. `fs_type` is empty for a raw one."""

    name: str
    fs_type: str
    size_bytes: int
    pool: str
    volume_id: str = ""
    content: list[bytes] = field(default_factory=list)

    @property
    def wire(self) -> csi_pb2.VolumeCapability:
        return encoded(mount(self.fs_type) if self.fs_type else block())


class Life:
    """One caller's volume, from creation to its end, in one of the driver's `pools`. `number` makes its name and pool
    and, with the seed, its choices.
    """

    def __init__(
        self,
        co: RetryingCo,
        root: Path,
        seed: int,
        number: int,
        pools: Sequence[str] = (DEFAULT_POOL,),
    ) -> None:
        self._co = co
        self._root = root
        self._chance = random.Random(f"{seed}:{number}")
        fs_type = self._chance.choice(("ext4", "ext4", "", "", "xfs"))
        pool = pools[number % len(pools)]
        self.volume = Volume(f"pvc-{number}", fs_type, _SIZES[fs_type], pool)

    async def run(self, turns: int) -> Volume | None:
        """Take so many steps; returns the volume if it is to stay."""
        await self._create(self.volume)
        for _ in range(turns):
            await self._turn()
        if self._chance.random() < 0.15:
            return self.volume
        await self.delete(self.volume)
        return None

    async def _turn(self) -> None:
        volume = self.volume
        await self._bring_up(volume)
        await self._write(volume)
        if self._chance.random() < 0.25:
            await self._restore(volume)
            await self._write(volume)
        await self._check(volume)
        await self._take_down(volume)
        if self._chance.random() < 0.3:
            await self._expand(volume)
        if volume.fs_type and self._chance.random() < 0.3:
            await self._defer(volume)

    async def verify(self, volume: Volume) -> None:
        """Compare a volume's content with what was synced."""
        await self._bring_up(volume)
        await self._check(volume)
        await self._take_down(volume)

    async def _create(self, volume: Volume, snapshot_id: str = "") -> None:
        made = await self._co.create(
            volume.name,
            volume.wire,
            size=volume.size_bytes,
            snapshot=snapshot_id,
            parameters={POOL: volume.pool},
        )
        assert made.capacity_bytes >= volume.size_bytes
        volume.volume_id = made.volume_id

    async def delete(self, volume: Volume) -> None:
        await self._co.delete(volume.volume_id)

    async def _bring_up(self, volume: Volume, *, defer: bool = False) -> csi_pb2.DeferredMount:
        volume_id, staging = volume.volume_id, self._staging(volume)
        await self._co.attach(volume_id, NODE, volume.wire)
        await self._co.stage(volume_id, staging, volume.wire)
        answer = await self._co.publish(
            volume_id, self._target(volume), volume.wire, defer=defer, staging=staging
        )
        return answer.deferred_mount

    async def _take_down(self, volume: Volume) -> None:
        await self._co.unpublish(volume.volume_id, self._target(volume))
        assert not os.path.lexists(self._target(volume))
        await self._co.unstage(volume.volume_id, self._staging(volume))
        await self._co.detach(volume.volume_id, NODE)

    async def _expand(self, volume: Volume) -> None:
        volume.size_bytes += _MORE
        await self._co.grow(volume.volume_id, volume.size_bytes)

    async def _defer(self, volume: Volume) -> None:
        """Published to a guest that never starts."""
        granted = await self._bring_up(volume, defer=True)
        assert granted.capacity_bytes == volume.size_bytes
        await self._take_down(volume)

    async def _restore(self, volume: Volume) -> None:
        """A snapshot of the volume in use holds what was synced before it."""
        name = f"of-{volume.name}-{len(volume.content)}"
        snapshot = await self._co.snapshot(volume.volume_id, name)
        name = f"from-{snapshot.snapshot_id}"
        copy = replace(volume, name=name, volume_id="", content=list(volume.content))
        await self._create(copy, snapshot.snapshot_id)
        await self._co.delete_snapshot(snapshot.snapshot_id)
        await self.verify(copy)
        await self.delete(copy)

    async def _write(self, volume: Volume) -> None:
        chunk = self._chance.randbytes(_CHUNK)
        await asyncio.to_thread(_write, self._data(volume), len(volume.content), chunk)
        volume.content.append(chunk)

    async def _check(self, volume: Volume) -> None:
        content = await asyncio.to_thread(_read, self._data(volume), len(volume.content))
        assert content == b"".join(volume.content), f"{volume.name} lost bytes"

    def _data(self, volume: Volume) -> str:
        target = self._target(volume)
        if volume.fs_type:
            assert os.path.ismount(target)
            return os.path.join(target, _FILE)
        assert Path(target).is_block_device()
        return target

    def _staging(self, volume: Volume) -> str:
        path = self._root / "staging" / volume.name
        path.mkdir(parents=True, exist_ok=True)
        return str(path)

    def _target(self, volume: Volume) -> str:
        pod = self._root / "pods" / volume.name
        pod.mkdir(parents=True, exist_ok=True)
        return str(pod / "mount")


def _write(path: str, place: int, chunk: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | (0 if os.path.exists(path) else os.O_CREAT))
    try:
        assert os.pwrite(fd, chunk, place * _CHUNK) == len(chunk)
        os.fsync(fd)
    finally:
        os.close(fd)


def _read(path: str, chunks: int) -> bytes:
    if not chunks:
        return b""
    with open(path, "rb") as file:
        return file.read(chunks * _CHUNK)
