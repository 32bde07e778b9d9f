"""Read-only volumes: who may write to the device, and how the sandbox has it."""

import contextlib
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

from crust.host.block import devices, loopctl
from crust.host.mounts import mount_api
from crust.host.process import commands
from crust_conformance.runtimes.subject import RuntimeUnderTest


@contextlib.asynccontextmanager
async def _mounted(subject: RuntimeUnderTest, device: str) -> AsyncIterator[str]:
    """The device's filesystem, mounted on the host for writing."""
    place = f"{subject.directory}/on-the-host"
    os.makedirs(place, exist_ok=True)
    await commands.run_command(["mount", "-t", "ext4", device, place], timeout_s=60)
    subject.transcript.append(f"({device} is mounted for writing at {place})")
    try:
        yield place
    finally:
        mount_api.unmount(place)


async def _without_journal(subject: RuntimeUnderTest) -> str:
    """A device with an ext4 that is mounted in two kernels: neither may replay a journal."""
    device = subject.device()
    argv = ["mkfs.ext4", "-q", "-O", "^has_journal", device]
    await commands.run_command(argv, timeout_s=60)
    return device


@contextlib.asynccontextmanager
async def _partition(subject: RuntimeUnderTest, device: str) -> AsyncIterator[str]:
    """A partition of the device, which begins at its start: so both have the same filesystem."""
    fd = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    try:
        loopctl.set_flags(fd, loopctl.status(fd).flags | loopctl.PARTITIONS)
    finally:
        os.close(fd)
    sectors = str(devices.size_bytes(device) // 512)
    await commands.run_command(["addpart", device, "1", "0", sectors], timeout_s=60)
    path = f"{device}p1"
    number = Path(f"/sys/class/block/{os.path.basename(path)}/dev").read_text()
    try:
        os.stat(path)
        is_made = False
    except FileNotFoundError:  # without devtmpfs nobody makes it
        os.mknod(path, 0o600 | stat.S_IFBLK, os.makedev(*map(int, number.split(":"))))
        is_made = True
    subject.transcript.append(f"({path} is a partition of {device})")
    try:
        yield path
    finally:
        if is_made:
            os.unlink(path)
        await commands.run_command(["delpart", device, "1"], timeout_s=60)


async def test_r129_mounted_partition(subject: RuntimeUnderTest) -> None:
    device = await _without_journal(subject)
    async with _partition(subject, device) as partition:
        target = subject.publish(device, readonly=True)
        async with _mounted(subject, partition):
            await subject.refused("box-1", target)
        assert not subject.is_held(target), "the lock is held after the refusal"
        await subject.started("box-2", target)
        await subject.stop("box-2")


async def test_r120_mounted_on_host(subject: RuntimeUnderTest) -> None:
    device = await _without_journal(subject)
    target = subject.publish(device, readonly=True)
    async with _mounted(subject, device) as place:
        await subject.refused("box-1", target)
        await commands.run_command(["mount", "-o", "remount,bind,ro", place], timeout_s=60)
        subject.transcript.append("(the mount is read-only, and its filesystem is not)")
        await subject.refused("box-2", target)
    assert not subject.is_held(target), "the lock is held after the refusal"


async def test_r121_held_on_host(subject: RuntimeUnderTest) -> None:
    device = await subject.formatted()
    target = subject.publish(device, readonly=True)
    held = devices.open_exclusive(device)
    subject.transcript.append(f"(another program holds {device} with O_EXCL)")
    try:
        await subject.refused("box-1", target)
    finally:
        os.close(held)
    assert not subject.is_held(target), "the lock is held after the refusal"


async def test_r122_journal(subject: RuntimeUnderTest) -> None:
    device = await subject.formatted()
    await commands.run_command(
        ["debugfs", "-w", "-R", "feature needs_recovery", device], timeout_s=60
    )
    before = Path(device).read_bytes()
    await subject.start("box-1", subject.publish(device, readonly=True))
    await subject.stop("box-1")
    assert Path(device).read_bytes() == before, (
        "the device was written to: it must be read-only for the sandbox, whose kernel replays a journal also for "
        "a read-only mount"
    )
