"""What the runtime needs of the world, so that its rules are tested without a virtual machine.

`examples.kata.vm.machine` and `handoff` are the real ones. Deadlines are theirs.
"""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Protocol

from crust import volumes
from crust.handoff.claims import State
from crust.handoff.record import Record
from crust.runtime_handler import NotDeferred, Resolved
from examples.kata.vm import disks, values, vm_directory


class Container(Protocol):
    """A command in a guest."""

    def output_pieces(self) -> AsyncIterator[values.Output]:
        """All output to the end."""

    async def wait(self) -> values.Exit:
        """How it ended, once it has."""

    async def kill(self) -> None:
        """Kill it; one that has ended is success."""

    async def release(self) -> None:
        """Let the guest forget it."""


class Guest(Protocol):
    """The inside of a VM."""

    async def mount(self, volume: values.VolumeMount) -> values.Mounted:
        """Mount a disk; the same again succeeds."""

    async def grow(self, volume: str, disk_bytes: int) -> values.Grown:
        """Grow the filesystem to its disk."""

    async def freeze(self, volume: str, thaw_after_s: int) -> None:
        """Flush the filesystem and hold its writers, for a time."""

    async def thaw(self, volume: str) -> bool:
        """Let them go on; whether they were held until now."""

    async def health(self) -> dict[str, values.Condition]:
        """The state of each mounted volume."""

    async def start(self, spec: values.ContainerSpec) -> Container:
        """Start a container."""


class HeldDescriptors(Protocol):
    """What QEMU holds for as long as it runs."""

    async def hold(self, name: str, fds: Sequence[int]) -> None:
        """Give duplicates of `fds` to QEMU."""

    async def release(self, name: str) -> None:
        """Have it close what it holds under `name`; absent is success."""

    async def held(self) -> dict[str, int]:
        """How many descriptors it holds, by name."""


class Vm(Protocol):
    """A running VM under this process's control."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def pid(self) -> int:
        """QEMU's process."""

    @property
    def identity(self) -> vm_directory.Identity:
        """How it was started."""

    @property
    def guest(self) -> Guest:
        """Its inside."""

    @property
    def descriptors(self) -> HeldDescriptors:
        """What its QEMU holds."""

    def runs(self) -> bool:
        """Whether it is not known to have ended."""

    async def attach(self, serial: str, source: Path, *, read_only: bool) -> disks.Disk:
        """Plug a disk; the same again succeeds."""

    async def detach(self, serial: str) -> None:
        """Unmount, then unplug; absent is success."""

    async def grow(self, serial: str, size_bytes: int) -> values.Usage:
        """Show the guest a disk's new size, and grow the filesystem on it."""

    async def limit(self, serial: str, limits: volumes.IoLimits) -> None:
        """Limit what the guest does to a disk, in place of what was set before."""

    async def limits(self, serial: str) -> volumes.IoLimits:
        """What a disk is limited to."""

    async def usage(self, serial: str) -> values.Usage:
        """Bytes and inodes."""

    async def wait(self) -> None:
        """Wait until it has ended."""

    async def stop(self) -> list[str]:
        """Shut it down, by force if need be; returns what could not be unmounted."""

    async def kill(self) -> None:
        """End it at once."""

    async def close(self) -> None:
        """Let go of it; it runs on."""


class Vms(Protocol):
    """Where VMs come from. A directory is one VM's."""

    async def start(self, name: str, directory: Path) -> Vm:
        """Start one; a start that fails leaves none running."""

    async def adopt(self, directory: Path) -> Vm:
        """Take over the one that runs there; raises `faults.VmGone`."""

    async def destroy(self, directory: Path) -> bool:
        """Kill whatever runs there, answering or not; raises `faults.VmGone` if nothing was ever started there."""


class Claim(Protocol):
    """A volume that one sandbox has: `crust.runtime_handler.Claim`."""

    @property
    def record(self) -> Record:
        """What was handed over."""

    @property
    def fds(self) -> tuple[int, ...]:
        """Lock and fence, for QEMU; empty after `hand_over`."""

    def report(self, state: State, error: str = "") -> None:
        """Tell how it goes."""

    def hand_over(self) -> None:
        """Close our copies of the descriptors."""

    def release(self) -> None:
        """Let go, after the VM's end."""


class Handoff(Protocol):
    """The handoff directory, as this runtime handler sees it. Everything blocks."""

    def resolve(self, source: str) -> Resolved | NotDeferred:
        """What a mount source means."""

    def claim(self, target: volumes.TargetPath, sandbox: volumes.SandboxId) -> Claim:
        """Take a volume for a sandbox."""

    def adopt(self, target: volumes.TargetPath, sandbox: volumes.SandboxId) -> Claim:
        """The claim that the sandbox's QEMU holds."""

    def records(self) -> Sequence[Record]:
        """Everything that is handed over and readable."""
