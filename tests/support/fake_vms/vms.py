"""VMs that outlive the daemon's objects, hold descriptors, and can hang or die; a `FakeVm` is the control of one."""

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from crust.core import errors, volumes
from examples.kata.vm import block_nodes, faults, values, vm_directory
from tests.support.fake_vms.guest import USAGE, FakeConsole, FakeGuest
from tests.support.fake_vms.world import MIB, RunningVm, World


class FakeVm:
    """`ports.Vm` and `ports.HeldDescriptors`."""

    def __init__(self, world: World, body: RunningVm) -> None:
        self.world = world
        self.body = body
        self._open = True
        self.name = body.directory.name
        self.named_process = body.process
        self.pid = body.process.pid
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
        body = self.world.bodies[directory] = RunningVm(directory)
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
