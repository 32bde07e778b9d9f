"""VMs without QEMU: they outlive the daemon's objects, hold descriptors, and can hang or die.

`World` is the state of a host: VMs by directory, and the locks of the handoff. A `FakeVm` is one process's control of
a VM.
"""

import asyncio
import collections
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from crust import errors, runtime_handler, volumes
from crust.handoff import claims
from crust.handoff.claims import State
from crust.handoff.record import Record
from examples.kata.runtime import ports
from examples.kata.runtime.taken_images import Taken
from examples.kata.vm import block_nodes, faults, values, vm_directory
from tests.support.fake_driver import Gate

USAGE = values.Usage(
    total_bytes=100, available_bytes=60, used_bytes=40,
    total_inodes=10, available_inodes=6, used_inodes=4,
)  # fmt: skip
MIB = 1024 * 1024


@dataclass
class Body:
    """A running VM, controlled or not."""

    directory: Path
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

    bodies: dict[Path, Body] = field(default_factory=dict)
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

    async def mounted(self, grow: Callable[[], Awaitable[object]]) -> None:
        if not self.record.readonly:
            await grow()
        assert self.ours, "written without the lock"
        self.states.append((State.MOUNTED, ""))

    def report_error(self, error: str) -> None:
        assert self.ours, "written without the lock"
        self.states.append((State.ERROR, error))

    def hold_device(self) -> None:
        assert self.ours, "the device of a claim that is handed over"

    def hand_over(self) -> None:
        self.ours = False

    def release(self) -> None:
        self.ours = False
        if self.is_locked():
            raise claims.HeldBySandbox(self.record.target, self.sandbox, self.world.handler)
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

    def resolve(self, source: str) -> runtime_handler.Resolved | runtime_handler.NotDeferred:
        record = self.world.records.get(source)
        if record is None:
            return runtime_handler.NotDeferred(source)
        return runtime_handler.Resolved(record, "")

    def claim(self, target: volumes.TargetPath, sandbox: volumes.SandboxId) -> FakeClaim:
        held = self.world.claims.get(target)
        if held is not None and held.is_locked():
            raise claims.HeldBySandbox(target, held.sandbox, self.world.handler)
        record = self.world.records[target.text]
        count = 2 if record.image is None else 1
        numbers = tuple(itertools.islice(self.world.numbers, count))
        claim = self.kind(self.world, record, sandbox, numbers)
        self.world.claims[target] = claim
        return claim

    def adopt(
        self, target: volumes.TargetPath, sandbox: volumes.SandboxId, holder_pid: int
    ) -> FakeClaim:
        held = self.world.claims.get(target)
        if held is None or not held.is_locked() or held.sandbox != sandbox:
            raise runtime_handler.ClaimLost(target, sandbox, "no process holds the lock")
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

    def records(self) -> Sequence[Record]:
        return tuple(self.world.records.values())


class FakeContainer:
    """`ports.Container`: prints `pieces`, and ends when `ended` is set or it is killed."""

    def __init__(self, pieces: Sequence[values.Output] = (), *, dies: bool = True) -> None:
        self.pieces = pieces
        self.dies = dies
        self.killed = asyncio.Event()
        self.ended = asyncio.Event()
        self.released = False

    async def output_pieces(self) -> AsyncIterator[values.Output]:
        for piece in self.pieces:
            yield piece

    async def wait(self) -> values.Exit:
        await self.ended.wait()
        return values.Exit(None, 9) if self.killed.is_set() else values.Exit(0, None)

    async def kill(self) -> None:
        self.killed.set()
        if self.dies:
            self.ended.set()

    async def release(self) -> None:
        self.released = True


class FakeGuest:
    """`ports.Guest`."""

    def __init__(self, vm: "FakeVm") -> None:
        self._vm = vm

    async def mount(self, volume: values.VolumeMount) -> values.Mounted:
        try:
            await self._vm.ask("mount")
            await self._vm.body.until_thawed(volume.volume)
        except faults.AgentTimedOut:
            self._vm.body.mounted.add(volume.volume)  # the mount continues in the guest
            raise
        self._vm.body.mounted.add(volume.volume)
        return values.Mounted(usage=USAGE)

    async def own(self, volume: str, group: values.FsGroup) -> values.Owned:
        await self._vm.ask("own")
        await self._vm.body.until_thawed(volume)
        return values.Owned(done=True, owned_entries=1)

    async def grow(self, volume: str, disk_bytes: int) -> values.Grown:
        await self._vm.ask("grow")
        await self._vm.body.until_thawed(volume)
        return values.Grown(usage=USAGE, disk_bytes=disk_bytes)

    async def freeze(self, volume: str, thaw_after_s: int) -> None:
        await self._vm.ask("freeze")
        self._check_mounted(volume)
        self._vm.body.frozen.add(volume)

    async def thaw(self, volume: str) -> bool:
        await self._vm.ask("thaw")
        self._check_mounted(volume)
        was_frozen = volume in self._vm.body.frozen
        self._vm.body.frozen.discard(volume)
        self._vm.body.thawed.set()
        return was_frozen

    async def health(self, volume: str) -> values.Condition:
        await self._vm.ask("health")
        self._check_mounted(volume)
        return values.Condition(abnormal=False, message="")

    async def start(self, spec: values.ContainerSpec) -> FakeContainer:
        await self._vm.ask("container")
        self._vm.body.starts.append(spec)
        container = self._vm.world.container or FakeContainer()
        if self._vm.world.container is None:
            container.ended.set()
        return container

    def _check_mounted(self, volume: str) -> None:
        if volume not in self._vm.body.mounted:
            raise faults.GuestNotFound(f"guest: volume {volume} is not mounted")


class FakeConsole:
    """`ports.Console` that prints what a test puts into it; None ends it."""

    def __init__(self) -> None:
        self.kept = b"booted\n"
        self.printed: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.followed = asyncio.Event()

    async def pieces(self, *, follow: bool) -> AsyncIterator[bytes]:
        yield self.kept
        while follow:
            self.followed.set()
            data = await self.printed.get()
            if data is None:
                return
            yield data


class FakeVm:
    """`ports.Vm` and `ports.HeldDescriptors`."""

    def __init__(self, world: World, body: Body) -> None:
        self.world = world
        self.body = body
        self._open = True
        self.name = body.directory.name
        self.pid = 4711
        self.identity = vm_directory.Identity(self.name, f"uuid of {self.name}", "tcg", 8)
        self.guest = FakeGuest(self)
        self.console = FakeConsole()

    @property
    def descriptors(self) -> "FakeVm":
        return self

    def runs(self) -> bool:
        return not self.body.ended.is_set()

    # HeldDescriptors.

    keeper_socket = None

    async def holder(self) -> int:
        return self.pid

    async def lost(self) -> None:
        await self.body.ended.wait()

    async def hold(self, name: str, fds: Sequence[int]) -> None:
        await self._control("hold")
        self.body.nodes[name] = list(fds)

    async def release(self, name: str) -> None:
        await self._control("release")
        self.body.nodes.pop(name, None)

    async def held(self) -> dict[str, int]:
        await self._control("held")
        return {name: len(fds) for name, fds in self.body.nodes.items()}

    # Vm.

    async def plugged(self) -> Sequence[str]:
        return sorted(self.body.plugged)

    async def attach(self, serial: str, source: Path, *, read_only: bool) -> block_nodes.Disk:
        await self._control("attach")
        assert len(self.body.nodes.get(serial, [])) == 2, "plugged without claim lock and device"
        self.body.plugged.add(serial)
        return block_nodes.Disk(serial, source, 64 * MIB, read_only, direct_io=True)

    async def attach_image(
        self,
        serial: str,
        image: volumes.NetworkImage,
        key: str,
        record: Callable[[], Awaitable[None]],
        *,
        read_only: bool,
    ) -> block_nodes.Disk:
        await self._control("attach")
        assert self.body.nodes.get(serial), "plugged without claim lock"
        assert self.world.images.get(str(image)) == self.identity.uuid, "opened without its claim"
        if serial not in self.body.plugged:
            await record()
        self.body.plugged.add(serial)
        return block_nodes.Disk(serial, Path(str(image)), 64 * MIB, read_only, direct_io=True)

    async def has_open(self, serial: str) -> bool:
        return serial in self.body.plugged

    async def detach(self, serial: str) -> None:
        await self.ask("unmount")
        self.body.mounted.discard(serial)
        self.body.frozen.discard(serial)
        await self._control("detach")
        self.body.plugged.discard(serial)
        self.body.limits.pop(serial, None)

    async def limit(self, serial: str, limits: volumes.IoLimits) -> None:
        await self._control("limit")
        if serial not in self.body.plugged:
            raise faults.DiskNotAttached(serial)
        self.body.limits[serial] = limits

    async def limits(self, serial: str) -> volumes.IoLimits:
        await self._control("limits")
        return self.body.limits.get(serial, volumes.IoLimits())

    async def grow(self, serial: str, size_bytes: int) -> values.Usage:
        await self.ask("grow")
        return USAGE

    async def usage(self, serial: str) -> values.Usage:
        await self.ask("usage")
        return USAGE

    async def wait(self) -> None:
        await self.body.ended.wait()

    async def stop(self) -> list[str]:
        with contextlib.suppress(errors.CrustError):
            await self.ask("shutdown")
        await self.kill()
        return []

    async def kill(self) -> None:
        if self._open:
            self.world.calls.append("kill")
            self.world.killed.set()
            self.body.ended.set()
            self.world.bodies.pop(self.body.directory, None)
        await self.close()

    async def close(self) -> None:
        self._open = False
        self.body.owned = False

    async def ask(self, operation: str) -> None:
        """Begin an operation of the guest, whose connection may end meanwhile."""
        self._check_connected()
        await self.world.step(operation)
        self._check_connected()

    def _check_connected(self) -> None:
        if not self._open or self.body.ended.is_set():
            raise faults.AgentDisconnected("this process closed the connection")

    async def _control(self, operation: str) -> None:
        if self.body.ended.is_set():
            raise faults.QmpDisconnected(operation, "QEMU ended")
        await self.world.step(operation)


@dataclass
class FakeVms:
    """`ports.Vms`. The directories are real."""

    world: World

    async def start(self, name: str, directory: Path) -> FakeVm:
        directory.mkdir(parents=True)
        (directory / "machine.json").write_text("{}")
        await self.world.step("start")
        body = self.world.bodies[directory] = Body(directory)
        return FakeVm(self.world, body)

    async def adopt(self, directory: Path) -> FakeVm:
        await self.world.step(f"adopt {directory.name}")
        body = self.world.bodies.get(directory)
        if body is None:
            raise faults.VmGone(directory)
        if body.owned:
            raise faults.VmAlreadyControlled(directory)
        body.owned = True
        return FakeVm(self.world, body)

    async def destroy(self, directory: Path) -> bool:
        self.world.calls.append(f"destroy {directory.name}")
        body = self.world.bodies.pop(directory, None)
        if body is not None:
            body.ended.set()
        return body is not None
