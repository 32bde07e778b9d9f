"""Hot-plugged disks of a VM, by serial number.

QEMU is the only record of the plugged disks: a disk's device is named `disk<slot>.<serial>` and its block node
`node.<serial>`, so a process that adopts the VM asks QEMU. Every step checks the current state first, so repeating an
interrupted operation completes it.

Failed reads and writes are reported to the guest (rerror/werror=report); a paused VM would hide the error from the
guest, which can handle it. QEMU's image lock refuses a disk that another VM has.
"""

import asyncio
import contextlib
import os
import re
import stat
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from crust.core import errors, volumes
from examples.kata.vm import block_nodes, faults, images, qmp
from examples.kata.vm.block_nodes import Disk

_SERIAL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,19}\Z")
_DEVICE = re.compile(r"disk(?P<slot>\d+)\.(?P<serial>.+)\Z")
# THROTTLE_VALUE_MAX: QEMU refuses larger values, and no disk is as fast.
_NO_THROTTLE = 10**15
_LOCKED = ("Failed to get", "lock")


class Disks:
    """The disks of one VM. One plug or unplug at a time."""

    def __init__(
        self, control: qmp.Qmp, directory: Path, slots: int, *, emulated: bool = False
    ) -> None:
        """`directory` is the VM's."""
        self._control = control
        self._slots = slots
        self._emulated = emulated
        self._nodes = block_nodes.DiskNodes(control, directory)
        self._limits: dict[str, volumes.IoLimits] = {}
        self._lock = asyncio.Lock()

    async def attach(self, serial: str, source: Path, *, read_only: bool) -> Disk:
        """Plug a block device or a regular file; the same again succeeds.

        Raises InvalidSerial, NotADisk, SerialInUse, DiskInUse, NoFreeSlot, QemuCommandFailed, QmpDisconnected.
        """
        if not _SERIAL.match(serial):
            raise faults.InvalidSerial(serial)
        driver = await asyncio.to_thread(_driver, source)
        async with self._lock:
            plugged = await self._plugged()
            disk = await self._nodes.find(serial)
            if disk is not None:
                _check_same(disk, source, read_only=read_only)
            if serial in plugged and disk is not None:
                return disk
            slot = self._free_slot(plugged)
            if disk is None:
                disk = await self._open(serial, source, driver, read_only=read_only)
            await self._plug(slot, serial, source)
            return disk

    async def attach_image(
        self,
        serial: str,
        opened: images.OpenedImage,
        record: Callable[[], Awaitable[None]],
        *,
        read_only: bool,
    ) -> Disk:
        """Plug an image of a Ceph cluster; the same again succeeds.

        `record` is called when QEMU has opened the image and the guest does not have it yet; if it fails, the image
        is closed again. If it fails because the cluster does not answer, it stays open: closing it waits for the
        cluster, in the loop that serves the other disks. Raises the errors of `record` and `attach`.
        """
        if not _SERIAL.match(serial):
            raise faults.InvalidSerial(serial)
        async with self._lock:
            await self._forget_key(serial)
            plugged = await self._plugged()
            disk = await self._nodes.find(serial)
            if serial in plugged and disk is not None:
                return disk
            slot = self._free_slot(plugged)
            if disk is None:
                disk = await self._open_image(serial, opened, read_only=read_only)
            try:
                await record()
            except errors.PeerUnavailable:
                raise
            except BaseException:
                await asyncio.shield(self._close(serial))
                raise
            await self._plug(slot, serial, disk.source, write_through=True)
            return disk

    async def _open_image(
        self, serial: str, opened: images.OpenedImage, *, read_only: bool
    ) -> Disk:
        secret = _secret_name(serial)
        await asyncio.to_thread(opened.write_conf)
        await self._control.execute("object-add", opened.secret(secret))
        try:
            arguments = opened.node(block_nodes.name_of(serial), secret, read_only=read_only)
            await self._control.execute("blockdev-add", arguments)
        finally:
            await self._control.execute("object-del", {"id": secret})
        disk = await self._nodes.find(serial)
        if disk is None:
            raise faults.QemuCommandFailed("blockdev-add", "the node is not there")
        return disk

    async def _forget_key(self, serial: str) -> None:
        """Remove the key that a process left which was killed, or lost QEMU, while the image was opened."""
        with contextlib.suppress(faults.QemuCommandFailed):  # there is none, as a rule
            await self._control.execute("object-del", {"id": _secret_name(serial)})

    async def _close(self, serial: str) -> None:
        await self._control.execute("blockdev-del", {"node-name": block_nodes.name_of(serial)})

    async def detach(self, serial: str, timeout_s: float) -> None:
        """Unplug a disk and close its source; absent is success. The guest must have unmounted it.

        Raises UnplugTimedOut, QemuCommandFailed, QmpDisconnected.
        """
        async with self._lock:
            slot = (await self._plugged()).get(serial)
            if slot is not None and not await self._control.unplug(
                f"disk{slot}.{serial}", timeout_s
            ):
                raise faults.UnplugTimedOut(serial, timeout_s)
            self._limits.pop(serial, None)
            if await self._nodes.has(serial):
                await self._close(serial)
            await self._nodes.forget(serial)

    async def resize(self, serial: str, at_least_bytes: int) -> int:
        """Show the guest the current size of the device or file behind a disk; returns the size.

        The size is read and not taken from the caller, because block_resize truncates a file or an image to the given
        size. That of an image the caller has read from its cluster: QEMU still has the size from before.
        Raises DiskNotAttached, DiskNotGrown, DiskReadOnly, NotADisk, QemuCommandFailed.
        """
        disk = await self.disk(serial)
        if disk.read_only:
            raise faults.DiskReadOnly(serial)
        length = at_least_bytes
        if disk.driver != images.DRIVER:
            length = await asyncio.to_thread(_length, disk.source)
        else:  # its controller may have grown it meanwhile; and its cluster has just told the size
            disk = await self._nodes.ask(serial) or disk
        if length < max(at_least_bytes, disk.size_bytes):
            raise faults.DiskNotGrown(disk.source, length, at_least_bytes)
        arguments = {"node-name": block_nodes.name_of(serial), "size": length}
        await self._control.execute("block_resize", arguments)
        await self._nodes.changed(replace(disk, size_bytes=length))
        return length

    async def limit(self, serial: str, limits: volumes.IoLimits) -> None:
        """Replace the I/O limits of a plugged disk; all values at once, idempotent.

        QEMU keeps them with the device: they survive the process that controls the VM, and end at the unplug.
        Raises DiskNotAttached, QemuCommandFailed, QmpDisconnected.
        """
        async with self._lock:
            slot = (await self._plugged()).get(serial)
            if slot is None:
                raise faults.DiskNotAttached(serial)
            # the virtio device below the PCI device has the drive
            device = f"/machine/peripheral/disk{slot}.{serial}/virtio-backend"
            await self._control.execute("block_set_io_throttle", _throttle(device, limits))
            self._limits[serial] = limits

    async def limits(self, serial: str) -> volumes.IoLimits:
        """The I/O limits of a plugged disk. Raises DiskNotAttached, QemuCommandFailed, QmpDisconnected.

        QEMU is asked for limits that an earlier process has set.
        """
        if serial not in await self._plugged():
            raise faults.DiskNotAttached(serial)
        if serial in self._limits:
            return self._limits[serial]
        command = "query-block"
        for row in qmp.rows(await self._control.execute(command), command):
            if f".{serial}/" in str(row.get("qdev")):
                return _limits(qmp.mapping(row.get("inserted"), command))
        raise faults.DiskNotAttached(serial)

    async def disk(self, serial: str) -> Disk:
        """One plugged disk. Raises DiskNotAttached."""
        disk = await self._nodes.find(serial)
        if disk is None or serial not in await self._plugged():
            raise faults.DiskNotAttached(serial)
        return disk

    async def has_open(self, serial: str) -> bool:
        """Whether QEMU has the disk's source open, whether or not it is plugged."""
        return await self._nodes.has(serial)

    async def serials(self) -> tuple[str, ...]:
        """All plugged disks."""
        return tuple(sorted(await self._plugged()))

    async def _plugged(self) -> dict[str, int]:
        command = "qom-list"
        answer = await self._control.execute(command, {"path": "/machine/peripheral"})
        names = (str(row.get("name")) for row in qmp.rows(answer, command))
        matches = (match for match in map(_DEVICE.match, names) if match)
        return {match["serial"]: int(match["slot"]) for match in matches}

    def _free_slot(self, plugged: dict[str, int]) -> int:
        free = sorted(set(range(self._slots)) - set(plugged.values()))
        if not free:
            raise faults.NoFreeSlot(self._slots)
        return free[0]

    async def _open(self, serial: str, source: Path, driver: str, *, read_only: bool) -> Disk:
        """Open the source with direct I/O, or without if its filesystem does not support it."""
        try:
            await self._add_node(serial, source, driver, read_only=read_only, direct=True)
        except faults.QemuCommandFailed as err:
            _check_unlocked(source, err)
            await self._add_node(serial, source, driver, read_only=read_only, direct=False)
        disk = await self._nodes.find(serial)
        if disk is None:
            raise faults.QemuCommandFailed("blockdev-add", "the node is not there")
        return disk

    async def _add_node(
        self, serial: str, source: Path, driver: str, *, read_only: bool, direct: bool
    ) -> None:
        arguments = {
            "driver": driver,
            "node-name": block_nodes.name_of(serial),
            "filename": str(source),
            "read-only": read_only,
            "discard": "unmap",
            "cache": {"direct": direct},
            # Linux AIO works with O_DIRECT alone.
            "aio": "native" if direct else "threads",
        }
        await self._control.execute("blockdev-add", arguments)

    async def _plug(
        self, slot: int, serial: str, source: Path, *, write_through: bool = False
    ) -> None:
        """Give the node to the guest.

        With `write_through` QEMU flushes after each write, and the guest need not ask: a synced write is one request
        and not two. It is for sources that keep nothing back: a flush costs little there, and on a disk milliseconds.
        """
        arguments = {
            "driver": "virtio-blk-pci",
            "id": f"disk{slot}.{serial}",
            "bus": f"slot{slot}",
            "drive": block_nodes.name_of(serial),
            "serial": serial,
            "rerror": "report",
            "werror": "report",
            "write-cache": "off" if write_through else "on",
            # An emulated processor is a thread of QEMU: it can submit a request itself instead of waking another one.
            "ioeventfd": not self._emulated,
        }
        try:
            await self._control.execute("device_add", arguments)
        except faults.QemuCommandFailed as err:
            await self._control.execute("blockdev-del", {"node-name": block_nodes.name_of(serial)})
            # QEMU takes the image lock for writing only when a device opens the node for writing.
            _check_unlocked(source, err)
            raise


def _throttle(device: str, limits: volumes.IoLimits) -> dict[str, object]:
    """QEMU requires all six values; the totals must be 0 where one direction is limited."""
    wanted = {
        "iops_rd": limits.read_iops,
        "iops_wr": limits.write_iops,
        "bps_rd": limits.read_bytes_per_second,
        "bps_wr": limits.write_bytes_per_second,
    }
    capped = {name: min(value, _NO_THROTTLE) for name, value in wanted.items()}
    return {"id": device, "iops": 0, "bps": 0, **capped}


def _limits(inserted: dict[str, object]) -> volumes.IoLimits:
    names = ("iops_rd", "iops_wr", "bps_rd", "bps_wr")
    return volumes.IoLimits(*(int(str(inserted.get(name, 0))) for name in names))


def _secret_name(serial: str) -> str:
    return f"key.{serial}"


def _check_same(disk: Disk, source: Path, *, read_only: bool) -> None:
    if disk.source != source or disk.read_only != read_only:
        access = "read-only" if disk.read_only else "read-write"
        raise faults.SerialInUse(disk.serial, f"{disk.source}, {access}")


def _check_unlocked(source: Path, err: faults.QemuCommandFailed) -> None:
    if all(word in err.reason for word in _LOCKED):
        raise faults.DiskInUse(source, err.reason) from err


def _length(source: Path) -> int:
    try:
        with source.open("rb") as file:
            return file.seek(0, os.SEEK_END)
    except OSError as err:
        raise faults.NotADisk(source, err.strerror or str(err)) from err


def _driver(source: Path) -> str:
    if not source.is_absolute():
        raise faults.NotADisk(source, "the path is not absolute")
    try:
        mode = os.stat(source).st_mode
    except OSError as err:
        raise faults.NotADisk(source, err.strerror or str(err)) from err
    if stat.S_ISBLK(mode):
        return "host_device"
    if stat.S_ISREG(mode):
        return "file"
    raise faults.NotADisk(source, "it is neither a block device nor a regular file")
