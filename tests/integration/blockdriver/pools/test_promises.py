"""A promise is a reservation: at any moment each volume of a pool can be written full, beside files of others.

Each life is a random sequence of what changes a pool's space. Files of others take at most the capacity that the
driver reports before they are written. `SEEDS` is the number of lives.
"""

import fcntl
import itertools
import os
import random
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from crust.blockdriver.engines.files import provisioning
from crust.blockdriver.host import btrfs
from crust.core import errors
from crust.core.volumes import VolumeId
from tests.integration.blockdriver.conftest import benches_on
from tests.support.drivers.block_driver import MIB, Bench, block

pytestmark = pytest.mark.root

SEEDS = range(int(os.environ.get("SEEDS", "2")))
STEPS = 24
BLOCK_BYTES = 4096
_BLKDISCARD = 0x1277

tight = benches_on("ext4", "xfs", "btrfs", size=320 * MIB)


class Life:
    """A pool, its volumes and snapshots, and files of others on its filesystem, by chance."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self.bench = bench
        self.chance = random.Random(seed)
        self.names = map(str, itertools.count())
        self.can_be_thick = not bench.driver.stores.provisioning.thick_obstacle()
        self.is_btrfs = bool(btrfs.filesystem_id(bench.root))
        self.volumes: dict[str, int] = {}
        self.thick: set[str] = set()
        self.snapshots: list[str] = []
        self.others: list[Path] = []
        self.told: list[str] = []

    async def step(self) -> None:
        """Do one thing. The driver may refuse it for want of capacity."""
        kinds: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (4, self.create), (2, self.clone), (2, self.restore), (4, self.snapshot), (2, self.delete_volume),
            (2, self.delete_snapshot), (2, self.restart), (3, self.write_other), (1, self.remove_other),
            (6, self.write), (2, self.rewrite), (2, self.discard), (2, self.detach), (1, self.grow), (1, self.fill),
        ]  # fmt: skip
        (act,) = self.chance.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])
        try:
            await act()
        except errors.Exhausted as err:
            if err.error_name != "OutOfCapacity":
                raise
            self.told.append(f"{act.__name__} refused")

    async def create(self) -> None:
        """Half of them as large as the pool allows, or nearly."""
        free = await self.bench.co.capacity()
        size = self.chance.choice(
            (self.chance.randrange(1, 32) * MIB, free * 3 // 4 // MIB * MIB, free)
        )
        kind = self.chance.choice(["thin", "thick"] if self.can_be_thick else ["thin"])
        volume = await self.made(max(size, MIB), parameters={"crust.dev/provisioning": kind})
        if kind == "thick":
            self.thick.add(volume)

    async def clone(self) -> None:
        if self.volumes:
            source = self.chance.choice(list(self.volumes))
            await self.made(self.volumes[source], volume=source)

    async def restore(self) -> None:
        if self.snapshots:
            snapshot = self.chance.choice(self.snapshots)
            await self.made(0, snapshot=snapshot)

    async def made(self, size: int, **source: Any) -> str:
        """The id of a new volume."""
        made = await self.bench.create(next(self.names), block(), size=size, **source)
        self.volumes[made.volume_id] = made.capacity_bytes
        self.told.append(f"made {made.capacity_bytes / MIB} {source}")
        return made.volume_id

    async def snapshot(self) -> None:
        if self.volumes:
            source = self.chance.choice(list(self.volumes))
            taken = await self.bench.co.snapshot(source, next(self.names))
            self.snapshots.append(taken.snapshot_id)
            self.told.append(f"snapshot {taken.snapshot_id} of {source}")

    async def delete_volume(self) -> None:
        if self.volumes:
            volume = self.chance.choice(list(self.volumes))
            self.bench.driver.stores.access.detach(VolumeId(volume))
            await self.bench.delete(volume)
            del self.volumes[volume]
            self.told.append(f"deleted {volume}")

    async def delete_snapshot(self) -> None:
        if self.snapshots:
            snapshot = self.snapshots.pop(self.chance.randrange(len(self.snapshots)))
            await self.bench.co.delete_snapshot(snapshot)
            self.told.append(f"deleted {snapshot}")

    async def restart(self) -> None:
        self.bench.restart()
        self.told.append("restart")

    async def write_other(self) -> None:
        free = await self.bench.co.capacity()
        size = self.chance.choice((free, self.chance.randrange(free + 1))) // MIB
        path = self.bench.root / next(self.names)
        self.others.append(path)
        self._write(path, size * MIB)
        self.told.append(f"others write {size}")

    async def remove_other(self) -> None:
        if self.others:
            self.others.pop(self.chance.randrange(len(self.others))).unlink()
            os.sync()
            self.told.append("others remove")

    async def write(self) -> None:
        if self.volumes:
            volume, size = self.chance.choice(list(self.volumes.items()))
            start = self.chance.randrange(size // MIB) * MIB
            self._write(self.device(volume), self.chance.randrange(start, size) + 1, start)
            self.told.append(f"written {volume} from {start / MIB}")

    async def rewrite(self) -> None:
        """In pieces that are smaller than an extent, and in any order."""
        if self.volumes:
            volume, size = self.chance.choice(list(self.volumes.items()))
            share = self.chance.choice((0.5, 0.99, 1))
            self.rewrite_blocks(self.device(volume), size, share)
            self.told.append(f"rewritten {volume}, {share}")

    async def discard(self) -> None:
        """Of a thin volume: the driver attaches a thick one, and each on btrfs, without discards."""
        thin = sorted(self.volumes.keys() - self.thick)
        if thin and not self.is_btrfs:
            volume = self.chance.choice(thin)
            size = self.volumes[volume]
            start = self.chance.randrange(size // MIB) * MIB
            end = self.chance.randrange(start, size) // 4096 * 4096 + 4096
            with self.device(volume).open("r+b") as device:
                fcntl.ioctl(device, _BLKDISCARD, struct.pack("=QQ", start, end - start))
            self.told.append(f"discarded {volume} from {start / MIB}")

    async def detach(self) -> None:
        if self.volumes:
            volume = VolumeId(self.chance.choice(list(self.volumes)))
            self.bench.driver.stores.access.detach(volume)
            self.told.append(f"detached {volume}")

    async def grow(self) -> None:
        if self.volumes:
            volume = self.chance.choice(list(self.volumes))
            size = self.volumes[volume] + self.chance.randrange(1, 16) * MIB
            await self.bench.grow(volume, size)
            self.volumes[volume] = size
            self.told.append(f"grown {volume}")

    def device(self, volume: str) -> Path:
        """The volume's device, as a pod of it has it."""
        attached = self.bench.driver.stores.access.attach(VolumeId(volume))
        return Path(attached.host_device.path)

    def end(self) -> None:
        """Detach all."""
        for volume in self.volumes:
            self.bench.driver.stores.access.detach(VolumeId(volume))

    async def fill(self) -> None:
        """Write all of each volume."""
        for volume, size in self.chance.sample(list(self.volumes.items()), len(self.volumes)):
            self._write(self.device(volume), size)
        self.told.append("all written")

    def _write(self, path: Path, end: int, start: int = 0) -> None:
        with self._told(path):
            write_all(path, end, start)

    def rewrite_blocks(self, path: Path, size: int, share: float) -> None:
        with self._told(path):
            rewrite(path, size, share, self.chance)

    @contextmanager
    def _told(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as err:  # a loop device says EIO
            pytest.fail(f"{err} at {path}: {self.told}")


DATA = random.Random(0).randbytes(MIB)


def write_all(path: Path, end: int, start: int = 0) -> None:
    """Write each byte, durably. Raises `OSError` where the disk is full."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        for offset in range(start, end, MIB):
            os.pwrite(fd, DATA[: end - offset], offset)
            if offset // MIB % 8 == 0:
                os.fdatasync(fd)
        os.fsync(fd)
    finally:
        os.close(fd)


def rewrite(path: Path, size: int, share: float, chance: random.Random) -> None:
    """Write so many of the blocks, one by one in any order, durably. Raises `OSError` where the disk is full."""
    offsets = range(0, size // BLOCK_BYTES * BLOCK_BYTES, BLOCK_BYTES)
    fd = os.open(path, os.O_WRONLY)
    try:
        for number, offset in enumerate(chance.sample(offsets, int(len(offsets) * share))):
            os.pwrite(fd, DATA[:BLOCK_BYTES], offset)
            if number % 1024 == 0:
                os.fdatasync(fd)
        os.fsync(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("copy", [None, "snapshot", "deleted snapshot", "clone"])
async def test_volume_rewritten_in_small_pieces_fits_its_size(
    tight: Bench, copy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if each extent was shared with a copy, and a block of it still is, or was until now."""
    monkeypatch.setattr(provisioning, "_LEAST_SPARE_BYTES", 24 * MIB)
    life = Life(tight, 0)
    written = await life.made(64 * MIB)
    write_all(life.device(written), 64 * MIB)
    if copy is not None:
        await (life.clone() if copy == "clone" else life.snapshot())
    if copy == "deleted snapshot":
        await life.delete_snapshot()
    for share in (0.99, 1):
        if left := await tight.co.capacity():
            write_all(life.device(await life.made(left)), left)
        for volume, size in life.volumes.items():
            life.rewrite_blocks(life.device(volume), size, share)
        await life.delete_snapshot()
    life.end()


@pytest.mark.parametrize("seed", SEEDS)
async def test_each_volume_of_a_random_life_can_be_filled(
    tight: Bench, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tight, seed)
    if (
        not life.is_btrfs
    ):  # which needs its spare for each overwrite: old blocks are free at a commit
        monkeypatch.setattr(provisioning, "_LEAST_SPARE_BYTES", 24 * MIB)
    try:
        for _ in range(STEPS):
            await life.step()
        await life.fill()
    finally:
        life.end()


async def test_files_of_others_beyond_free_capacity_leave_thick_volumes(tight: Bench) -> None:
    """They can be filled; the thin ones are unhealthy before a write to one fails."""
    life, kinds = Life(tight, 0), ["thin"]
    if not tight.driver.stores.provisioning.thick_obstacle():
        kinds.append("thick")
    for kind in kinds:
        await life.made(64 * MIB, parameters={"crust.dev/provisioning": kind})
    with (tight.root / "others").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(DATA)
            os.fdatasync(file.fileno())
    assert await tight.co.capacity() == 0
    volumes = dict(zip(kinds, life.volumes, strict=True))
    check = tight.driver.controller.health_check
    found = {kind: check.examine(VolumeId(volume)).findings for kind, volume in volumes.items()}
    assert [of.reason for of in found.pop("thin")] == ["CapacityMissing"]
    assert all(of == () for of in found.values())
    for volume in list(volumes.values())[1:]:
        write_all(life.device(volume), 64 * MIB)
    with pytest.raises(OSError, match=r"No space left|Input/output error"):
        write_all(life.device(volumes["thin"]), 64 * MIB)
    life.end()
