"""What answers inside of a VM: the guest's agent, a container, the console."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from examples.kata.vm import faults, values

if TYPE_CHECKING:
    from tests.support.fake_vms.vms import FakeVm

USAGE = values.Usage(
    total_bytes=100, available_bytes=60, used_bytes=40,
    total_inodes=10, available_inodes=6, used_inodes=4,
)  # fmt: skip


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
