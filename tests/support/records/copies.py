"""Snapshots, groups, restores and clones as tests of the driver make them, and how their bytes are compared."""

import hashlib
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from crust.core import volumes
from crust.host.mounts import mountinfo
from crust.host.process import syscalls
from crust.wire.csi.v1 import csi_pb2
from tests.support import frozen
from tests.support.drivers.block_driver import MIB, Bench, block, caller, mount
from tests.support.records import pool_layout

KIB = 1024


async def made_of(
    bench: Bench,
    name: str,
    *,
    snapshot_id: str = "",
    volume_id: str = "",
    size: int = 0,
    fs_type: str = "ext4",
    raw: bool = False,
    **of: Any,
) -> csi_pb2.Volume:
    of |= {"volume": volume_id, "snapshot": snapshot_id, "size": size}
    return await bench.create(name, block() if raw else mount(fs_type), **of)


async def up(bench: Bench, volume_id: str, fs_type: str = "ext4", *, raw: bool = False) -> str:
    capability = block() if raw else mount(fs_type)
    target = bench.target(volume_id)
    await bench.up(volume_id, target, capability)
    return target


async def in_use(
    bench: Bench, name: str, capability: volumes.VolumeCapability | None = None, **of: Any
) -> tuple[str, str]:
    """The id of a new volume, which is staged and published, and its target."""
    volume_id = (await bench.create(name, capability, **of)).volume_id
    await bench.up(volume_id, bench.target(volume_id), capability)
    return volume_id, bench.target(volume_id)


async def down(bench: Bench, volume_id: str) -> None:
    await bench.down(volume_id, bench.target(volume_id))


def left_frozen(bench: Bench, volume_id: str, target: str) -> Path:
    """Freeze as a driver does that is killed then; the file with its note."""
    entry = bench.root / "run" / "freezes" / volume_id
    entry.write_text(f"{syscalls.boot_id()} {bench.host_device(volume_id).identity}\n")
    entry.chmod(0o600)
    frozen.freeze(target)
    return entry


async def raw_pair(bench: Bench) -> tuple[list[str], list[str]]:
    made = [await bench.create(name, block()) for name in ("one", "two")]
    ids = sorted(volume.volume_id for volume in made)
    return ids, [await up(bench, volume_id, raw=True) for volume_id in ids]


def records(bench: Bench) -> set[str]:
    """The volumes that are on record."""
    return pool_layout.volume_records(bench.root / "state")


def pool_type(bench: Bench) -> str:
    mount = mountinfo.at(str(bench.root))
    assert mount is not None
    return mount.fs_type


def write(directory: str, name: str, data: bytes) -> None:
    """Without a sync: a snapshot must not need one."""
    with open(os.path.join(directory, name), "wb") as file:
        file.write(data)


def digest(directory: str, name: str) -> str:
    with open(os.path.join(directory, name), "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def stamp(target: str, text: bytes) -> None:
    fd = os.open(target, os.O_WRONLY)
    os.pwrite(fd, text, MIB)
    os.close(fd)


def unmount_lazily(target: str) -> None:
    subprocess.run(["umount", "--lazy", target], check=True)


async def blocks(
    bench: Bench, target: str, base: str = "", *, count: int = 0
) -> list[list[tuple[int, int]]]:
    controller = bench.driver.controller
    messages: AsyncIterator[Any]
    if base:
        delta = csi_pb2.GetMetadataDeltaRequest(
            base_snapshot_id=base, target_snapshot_id=target, max_results=count
        )
        messages = controller.GetMetadataDelta(delta, caller())
    else:
        request = csi_pb2.GetMetadataAllocatedRequest(snapshot_id=target, max_results=count)
        messages = controller.GetMetadataAllocated(request, caller())
    return [
        [(block.byte_offset, block.size_bytes) for block in message.block_metadata]
        async for message in messages
    ]


def read_image(bench: Bench, snapshot_id: str) -> bytes:
    return (pool_layout.snapshot_image(bench.root / "state", snapshot_id)).read_bytes()


def differing_blocks(old: bytes, new: bytes) -> set[int]:
    step = 4 * KIB
    return {n for n in range(0, len(new), step) if old[n : n + step] != new[n : n + step]}


def covered(pieces: list[list[tuple[int, int]]]) -> set[int]:
    step = 4 * KIB
    return {
        n
        for piece in pieces
        for offset, size in piece
        for n in range(offset - offset % step, offset + size, step)
    }
