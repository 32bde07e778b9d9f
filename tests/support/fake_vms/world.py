"""The state of a host: its VMs by directory, and the locks of the handoff."""

import asyncio
import collections
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from crust.core import errors, volumes
from crust.handoff.record import Record
from crust.host.process.processes import Process
from examples.kata.runtime.taken_images import Taken
from examples.kata.vm import values
from tests.support.drivers.fake_driver import Gate

if TYPE_CHECKING:
    from tests.support.fake_vms.guest import FakeContainer
    from tests.support.fake_vms.handoff import FakeClaim

MIB = 1024 * 1024
_PIDS = itertools.count(4711)


@dataclass
class RunningVm:
    """A running VM, controlled or not."""

    directory: Path
    process: Process = field(default_factory=lambda: Process(next(_PIDS), 1))
    plugged: set[str] = field(default_factory=set)
    mounted: set[str] = field(default_factory=set)
    nodes: dict[str, list[int]] = field(default_factory=lambda: collections.defaultdict(list))
    """The descriptors that QEMU holds, by name: they are the locks of `World.locks`."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    owned: bool = True
    starts: list[values.ContainerSpec] = field(default_factory=list)
    limits: dict[str, volumes.IoLimits] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    thawed: asyncio.Event = field(default_factory=asyncio.Event)

    async def until_thawed(self, name: str) -> None:
        """A change of a frozen filesystem waits for the thaw."""
        while name in self.frozen:
            self.thawed.clear()
            await self.thawed.wait()


@dataclass
class World:
    """The host. `failures` are raised once, by operation; `gates` stop one until it may go on."""

    bodies: dict[Path, RunningVm] = field(default_factory=dict)
    failures: dict[str, list[errors.CrustError]] = field(
        default_factory=lambda: collections.defaultdict(list)
    )
    gates: dict[str, Gate] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    claims: dict[volumes.TargetPath, "FakeClaim"] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(100))
    handler: str = "kata"
    secrets: dict[str, str] = field(default_factory=dict)
    images: dict[str, str] = field(default_factory=dict)
    """Images that are taken in their cluster, and by which VM."""
    taken: dict[tuple[str, volumes.TargetPath], Taken] = field(default_factory=dict)
    """What is noted on the disk."""
    image_bytes: int = 64 * MIB
    container: "FakeContainer | None" = None
    killed: asyncio.Event = field(default_factory=asyncio.Event)

    async def step(self, operation: str) -> None:
        """Begin an operation: record it, wait at its gate, raise its failure."""
        self.calls.append(operation)
        gate = self.gates.get(operation)
        if gate is not None:
            gate.entered.set()
            await gate.opened.wait()
        if self.failures[operation]:
            raise self.failures[operation].pop(0)

    def is_locked(self, target: volumes.TargetPath) -> bool:
        """Whether the daemon or a running VM has the volume."""
        claim = self.claims.get(target)
        return claim is not None and claim.is_locked()
