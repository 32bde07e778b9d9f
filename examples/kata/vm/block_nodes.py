"""QEMU's block nodes, asked for in a way that does not wait for their storage.

query-block and query-named-block-nodes read the first bytes of an image of Ceph, in the main loop and without a time
limit: while the cluster does not answer, one such question stops the whole virtual machine. So names come from
query-blockstats, which reads nothing, and a disk's facts are asked once and then remembered; of an image in a file
too, for the process that adopts the virtual machine:

    <directory of the VM>/disk-<serial>.json      there before the guest has the disk, and gone after the unplug
"""

import asyncio
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import pydantic

from crust.core import errors
from crust.host.files import durable
from examples.kata.vm import faults, images, qmp

_NODE = "node."
_LIMIT_BYTES = 4096
_FACTS = "query-named-block-nodes"


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk as QEMU has it."""

    serial: str
    source: Path
    size_bytes: int
    read_only: bool
    direct_io: bool
    driver: str = "host_device"
    """QEMU's name of the driver that opens it."""


def name_of(serial: str) -> str:
    """The node of a disk."""
    return f"{_NODE}{serial}"


async def names(control: qmp.Qmp) -> frozenset[str]:
    """The names of all nodes. Raises QemuCommandFailed, QmpDisconnected."""
    command = "query-blockstats"
    rows = qmp.rows(await control.execute(command, {"query-nodes": True}), command)
    return frozenset(str(row.get("node-name")) for row in rows)


class DiskNodes:
    """The nodes of disks. All raise QemuCommandFailed, QmpDisconnected."""

    def __init__(self, control: qmp.Qmp, directory: Path) -> None:
        self._control = control
        self._directory = directory
        self._known: dict[str, Disk] = {}

    async def has(self, serial: str) -> bool:
        """Whether the node is there."""
        return name_of(serial) in await names(self._control)

    async def find(self, serial: str) -> Disk | None:
        """The disk, as it was when it was asked for or resized first; None if it is not there."""
        if not await self.has(serial):
            await self.forget(serial)
            return None
        if serial not in self._known:
            noted = await asyncio.to_thread(self._noted, serial)
            if noted is not None:
                self._known[serial] = noted
        return self._known.get(serial) or await self.ask(serial)

    async def ask(self, serial: str) -> Disk | None:
        """The disk as it is now; waits for its cluster."""
        rows = qmp.rows(await self._control.execute(_FACTS, {"flat": True}), _FACTS)
        for row in rows:
            if row.get("node-name") == name_of(serial):
                disk = _disk(serial, row)
                await self.changed(disk)
                return disk
        return None

    async def changed(self, disk: Disk) -> None:
        """Remember the disk's new facts."""
        self._known[disk.serial] = disk
        if disk.driver == images.DRIVER:
            text = json.dumps({**asdict(disk), "source": str(disk.source)})
            await asyncio.to_thread(_write, self._note(disk.serial), text)

    async def forget(self, serial: str) -> None:
        """It is not there any more."""
        self._known.pop(serial, None)
        await asyncio.to_thread(self._note(serial).unlink, missing_ok=True)

    def _note(self, serial: str) -> Path:
        return self._directory / f"disk-{serial}.json"

    def _noted(self, serial: str) -> Disk | None:
        """By the file; None for a disk that has none, and for a file of another version."""
        try:
            data = durable.read(self._note(serial), limit_bytes=_LIMIT_BYTES)
            return pydantic.TypeAdapter(Disk).validate_json(data)
        except (errors.CrustError, ValueError):
            return None


def _disk(serial: str, node: dict[str, object]) -> Disk:
    image = qmp.mapping(node.get("image"), _FACTS)
    cache = qmp.mapping(node.get("cache"), _FACTS)
    size = image.get("virtual-size")
    if not isinstance(size, int):
        raise faults.QemuCommandFailed(_FACTS, "a node has no size")
    return Disk(
        serial=serial,
        source=Path(str(node.get("file"))),
        size_bytes=size,
        read_only=node.get("ro") is True,
        direct_io=cache.get("direct") is True,
        driver=str(node.get("drv")),
    )


def _write(path: Path, text: str) -> None:
    durable.write_file(path, text.encode(), survives_power_cut=False)
