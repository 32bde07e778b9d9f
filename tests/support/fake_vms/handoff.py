"""The handoff directory in memory: claims whose locks live in VMs, and images that are taken in their cluster."""

import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from crust.core import errors, volumes
from crust.handoff import claims
from crust.handoff.claims import State
from crust.handoff.record import Record
from crust.host.process.processes import Process
from crust.runtime_handler import blocking
from examples.kata.runtime import ports
from examples.kata.runtime.taken_images import Taken
from tests.support.fake_vms.world import World


@dataclass
class FakeClaim:
    """`ports.Claim`: the lock is held by the daemon's descriptors or by those that a VM was given."""

    world: World
    record: Record
    sandbox: str
    numbers: tuple[int, ...]
    """The lock and, unless it is an image, the device."""
    ours: bool = True
    states: list[tuple[State, str]] = field(default_factory=list)
    vm: Process | None = None
    is_given_back: bool = False
    """Claim.json names no process any more."""
    is_kept: Callable[[], None] | None = None
    """A keeper holds the lock, whatever the VM does; called when it is in the way."""

    @property
    def fds(self) -> tuple[int, ...]:
        return self.numbers if self.ours else ()

    @property
    def sandbox_id(self) -> volumes.SandboxId:
        return volumes.SandboxId(self.sandbox)

    def is_locked(self) -> bool:
        alive = (body for body in self.world.bodies.values() if not body.ended.is_set())
        held = {fd for body in alive for fds in body.nodes.values() for fd in fds}
        return self.ours or self.numbers[0] in held

    def vm_lives(self, claimant: Process | None) -> bool:
        """Whether the process of claim.json runs: then the claim is in nobody's way but the claimant's own."""
        running = [body.process for body in self.world.bodies.values() if not body.ended.is_set()]
        return not self.is_given_back and self.vm != claimant and self.vm in running

    def report_mounted(self) -> None:
        assert self.ours, "written without the lock"
        self.states.append((State.MOUNTED, ""))

    def report_error(self, error: str) -> None:
        assert self.ours, "written without the lock"
        self.states.append((State.ERROR, error))

    def hold_device(self, its_vm: int) -> None:
        assert self.ours, "the device of a claim that is handed over"

    def hand_over(self, to: int) -> None:
        self.ours = False
        assert self.is_locked(), "handed over to nobody"

    def close(self) -> None:
        self.ours = False

    def release(self, *, error: str = "") -> None:
        stays = False
        try:
            if error:
                self.report_error(error)
                stays = True
        finally:
            self.ours = False
            if self.is_kept is not None:
                self.is_kept()
            if self.is_locked() or self.is_kept is not None:
                raise claims.HeldBySandbox(self.record.target, self.sandbox, self.world.handler)
            self.is_given_back = True
            if not stays:
                self.world.claims.pop(self.record.target, None)


@dataclass
class FakeTakenImage:
    """`ports.TakenImage`."""

    world: World
    key: str = "key of the node"

    async def record(self) -> None:
        await self.world.step("record")


@dataclass
class FakeHandoff:
    """`ports.Handoff`."""

    world: World
    kind: type[FakeClaim] = FakeClaim
    keys: set[volumes.TargetPath] = field(default_factory=set)
    """Whose image's key this process knows."""

    def resolve(self, source: str) -> blocking.Resolved | blocking.NotDeferred:
        record = self.world.records.get(source)
        if record is None:
            return blocking.NotDeferred(source)
        return blocking.Resolved(record, "")

    def claim(
        self, target: volumes.TargetPath, sandbox: volumes.SandboxId, vm: Process | None = None
    ) -> FakeClaim:
        held = self.world.claims.get(target)
        if held is not None and (held.is_locked() or held.vm_lives(vm)):
            raise claims.HeldBySandbox(target, held.sandbox, self.world.handler)
        record = self.world.records[target.text]
        count = 2 if record.image is None else 1
        numbers = tuple(itertools.islice(self.world.numbers, count))
        claim = self.kind(self.world, record, sandbox, numbers, vm=vm)
        self.world.claims[target] = claim
        return claim

    def adopt(
        self, target: volumes.TargetPath, sandbox: volumes.SandboxId, holder_pid: int
    ) -> FakeClaim:
        held = self.world.claims.get(target)
        if held is None or not held.is_locked() or held.sandbox != sandbox:
            raise blocking.ClaimLost(target, sandbox, "no process holds the lock")
        held.ours = True
        return held

    async def secrets(self, target: volumes.TargetPath) -> Mapping[str, str]:
        await self.world.step("secrets")
        return self.world.secrets

    @contextlib.asynccontextmanager
    async def taking(
        self, record: Record, vm_id: str, sandbox: volumes.SandboxId
    ) -> AsyncIterator["FakeTakenImage"]:
        assert record.image is not None
        self.keys.add(record.target)
        await self.world.step("note")
        self.world.taken[vm_id, record.target] = Taken(vm_id, sandbox, record.target, record.image)
        await self.world.step("take")
        assert self.world.is_locked(record.target), "taken without the volume's claim"
        holder = self.world.images.setdefault(str(record.image), vm_id)
        if holder != vm_id:
            raise errors.NotReady(f"{holder} has the image")
        yield FakeTakenImage(self.world)

    async def _know_key(self, target: volumes.TargetPath) -> None:
        if target in self.keys:
            return
        await self.world.step("key")
        if not self.world.is_locked(target):
            raise errors.NotReady("no live sandbox has claimed it")
        self.keys.add(target)

    async def image_size(self, record: Record) -> int:
        await self.world.step("size")
        return self.world.image_bytes

    async def give_back(self, record: Record, vm_id: str, sandbox: volumes.SandboxId) -> None:
        assert record.image is not None
        await self._know_key(record.target)
        await self._give_back(Taken(vm_id, sandbox, record.target, record.image))

    def taken(self) -> Sequence[Taken]:
        return tuple(self.world.taken.values())

    async def give_back_of_ended(self, taken: Taken) -> None:
        if taken.target not in self.keys:
            claim = self.claim(taken.target, taken.sandbox)
            try:
                await self._know_key(taken.target)
            finally:
                claim.release()
        await self._give_back(taken)

    async def _give_back(self, taken: Taken) -> None:
        await self.world.step("give back")
        plugged = (body.plugged for body in self.world.bodies.values() if not body.ended.is_set())
        assert not any(plugged), "given back while a VM has it"
        if self.world.images.get(str(taken.image)) == taken.vm_id:
            del self.world.images[str(taken.image)]
        self.world.taken.pop((taken.vm_id, taken.target), None)

    def recover(self, lost: ports.LostClaims) -> None:
        raise AssertionError("QEMU holds the claims of these VMs")

    def claimed_for(self, vm: Process) -> Sequence[Record]:
        return tuple(claim.record for claim in self.world.claims.values() if claim.vm == vm)

    def records(self) -> Sequence[Record]:
        return tuple(self.world.records.values())
