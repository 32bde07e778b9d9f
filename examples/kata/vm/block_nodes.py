"""QEMU's block nodes, asked for in a way that does not wait for what is behind them.

query-block and query-named-block-nodes read the first bytes of an image of Ceph, in the main loop and without a time
limit: while the cluster does not answer, one such question stops the whole virtual machine. So names come from
query-blockstats, which reads nothing, and what a disk is is asked once and then remembered.
"""

from dataclasses import dataclass
from pathlib import Path

from examples.kata.vm import faults, qmp

_NODE = "node."
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
    """QEMU's name of what opens it."""


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

    def __init__(self, control: qmp.Qmp) -> None:
        self._control = control
        self._known: dict[str, Disk] = {}

    async def has(self, serial: str) -> bool:
        """Whether the node is there."""
        return name_of(serial) in await names(self._control)

    async def find(self, serial: str) -> Disk | None:
        """The disk, as it was when it was asked for or resized first; None if it is not there."""
        if not await self.has(serial):
            self._known.pop(serial, None)
            return None
        return self._known.get(serial) or await self.ask(serial)

    async def ask(self, serial: str) -> Disk | None:
        """The disk as it is now; waits for its cluster."""
        rows = qmp.rows(await self._control.execute(_FACTS, {"flat": True}), _FACTS)
        for row in rows:
            if row.get("node-name") == name_of(serial):
                self._known[serial] = _disk(serial, row)
                return self._known[serial]
        return None

    def changed(self, disk: Disk) -> None:
        """What it is from now on."""
        self._known[disk.serial] = disk


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
