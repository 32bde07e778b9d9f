"""Protocols for VMs and the handoff directory, so that the runtime's rules are tested without a VM.

`daemon` and `handoff` implement them. The implementations enforce the deadlines.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from crust.core import volumes
from crust.handoff.record import Record
from crust.runtime_handler.blocking import NotDeferred, Process, Resolved
from examples.kata.runtime.taken_images import Taken
from examples.kata.vm import block_nodes, values, vm_directory


class Container(Protocol):
    """A command in a guest."""

    def output_pieces(self) -> AsyncIterator[values.Output]:
        """All output to the end."""

    async def wait(self) -> values.Exit:
        """How it ended, once it has."""

    async def kill(self) -> None:
        """Kill it; an ended one is success."""

    async def release(self) -> None:
        """Remove its record from the guest."""


class Guest(Protocol):
    """The inside of a VM."""

    async def mount(self, volume: values.VolumeMount) -> values.Mounted:
        """Mount a disk; the same again succeeds."""

    async def own(self, volume: str, group: values.FsGroup) -> values.Owned:
        """Apply an fsGroup; the same again succeeds."""

    async def grow(self, volume: str, disk_bytes: int) -> values.Grown:
        """Grow the filesystem to its disk."""

    async def freeze(self, volume: str, thaw_after_s: int) -> None:
        """Flush and freeze the filesystem, for `thaw_after_s` at most."""

    async def thaw(self, volume: str) -> bool:
        """Thaw the filesystem; returns whether it was frozen until now."""

    async def health(self, volume: str) -> values.Condition:
        """The condition of a mounted volume; raises `faults.GuestNotFound`."""

    async def start(self, spec: values.ContainerSpec) -> Container:
        """Start a container."""


class HeldDescriptors(Protocol):
    """Descriptors that QEMU, or its keeper, holds open for as long as QEMU runs."""

    @property
    def keeper_socket(self) -> Path | None:
        """Where the keeper serves; None if QEMU holds them itself."""

    async def hold(self, name: str, fds: Sequence[int]) -> None:
        """Give duplicates of `fds` to it."""

    async def release(self, name: str) -> None:
        """Have it close the descriptors under `name`; absent is success."""

    async def held(self) -> dict[str, int]:
        """The number of descriptors that it holds, by name."""

    async def holder(self) -> int:
        """The process that holds them."""

    async def lost(self) -> None:
        """Wait until their holder has ended; the VM may still run."""


class Console(Protocol):
    """The output of a guest."""

    def pieces(self, *, follow: bool) -> AsyncIterator[bytes]:
        """The kept output; with `follow` also later output, until the VM ends or is released."""


class Vm(Protocol):
    """A running VM under this process's control."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def pid(self) -> int:
        """QEMU's process."""

    @property
    def named_process(self) -> Process:
        """The same, with its start. Raises `errors.NotFound` if it has ended."""

    @property
    def identity(self) -> vm_directory.Identity:
        """How it was started."""

    @property
    def guest(self) -> Guest:
        """Its inside."""

    @property
    def descriptors(self) -> HeldDescriptors:
        """The descriptors that it holds, or its keeper."""

    @property
    def console(self) -> Console:
        """Its console."""

    def runs(self) -> bool:
        """Whether it is not known to have ended."""

    async def plugged(self) -> Sequence[str]:
        """The disks that it has."""

    async def attach(self, serial: str, source: Path, *, read_only: bool) -> block_nodes.Disk:
        """Plug a disk; the same again succeeds."""

    async def attach_image(
        self,
        serial: str,
        image: volumes.NetworkImage,
        key: str,
        record: Callable[[], Awaitable[None]],
        *,
        read_only: bool,
    ) -> block_nodes.Disk:
        """Plug an image, and call `record` before the guest has it; the same again succeeds."""

    async def has_open(self, serial: str) -> bool:
        """Whether it has the disk's source open, plugged or not."""

    async def detach(self, serial: str) -> None:
        """Unmount, then unplug; absent is success."""

    async def grow(self, serial: str, size_bytes: int) -> values.Usage:
        """Show the guest a disk's new size, and grow the filesystem on it."""

    async def limit(self, serial: str, limits: volumes.IoLimits) -> None:
        """Replace a disk's I/O limits."""

    async def limits(self, serial: str) -> volumes.IoLimits:
        """A disk's I/O limits."""

    async def usage(self, serial: str) -> values.Usage:
        """Bytes and inodes."""

    async def wait(self) -> None:
        """Wait until it has ended."""

    async def stop(self) -> list[str]:
        """Shut it down, by force if need be; returns the volumes that are still mounted."""

    async def kill(self) -> None:
        """End it at once."""

    async def close(self) -> None:
        """Release control of it; it continues to run."""


class Vms(Protocol):
    """Starts, adopts and destroys VMs. Each VM has its own directory."""

    async def start(self, name: str, directory: Path) -> Vm:
        """Start a VM; a failed start leaves none running."""

    async def adopt(self, directory: Path) -> Vm:
        """Take control of the VM that runs in `directory`; raises `faults.VmGone`."""

    async def destroy(self, directory: Path) -> bool:
        """Kill the VM in `directory`, even if it does not answer; raises `faults.VmGone` if none was ever started."""


class Claim(Protocol):
    """One sandbox's claim on a volume: `crust.runtime_handler.Claim`."""

    @property
    def record(self) -> Record:
        """The handoff record."""

    @property
    def sandbox_id(self) -> volumes.SandboxId:
        """The sandbox."""

    @property
    def fds(self) -> tuple[int, ...]:
        """The claim lock and the exclusive hold on the device; empty after `hand_over` and `close`."""

    def report_mounted(self) -> None:
        """Write "mounted" into claim.json."""

    def report_error(self, error: str) -> None:
        """Write the reason into claim.json."""

    def hold_device(self, its_vm: int) -> None:
        """Open the device again, after its holder has ended."""

    def hand_over(self, to: int) -> None:
        """Close our copies of the descriptors, if that process has its own."""

    def close(self) -> None:
        """Close our copies of the descriptors."""

    def release(self, *, error: str = "") -> None:
        """Give the claim up after the VM has given the device back, or ended; with the reason, if it failed."""


class TakenImage(Protocol):
    """An image that this host has in its cluster."""

    @property
    def key(self) -> str:
        """The key of its user."""

    async def record(self) -> None:
        """Record the client that has opened it, before the guest has it."""


@dataclass(frozen=True, slots=True)
class LostClaims:
    """A VM whose keeper may have ended: the volumes that it uses (None: entry unknown), and the claims in hand."""

    sandbox: volumes.SandboxId
    vm: Process
    keeper_socket: Path
    used: Mapping[str, volumes.TargetPath | None]
    in_hand: Mapping[str, Claim]


class Handoff(Protocol):
    """The handoff directory, under this runtime handler's name, and the claims on images in their clusters.

    All methods block that do not say otherwise.
    """

    def resolve(self, source: str) -> Resolved | NotDeferred:
        """Resolve a mount source to a deferred volume."""

    def claim(
        self, target: volumes.TargetPath, sandbox: volumes.SandboxId, vm: Process | None = None
    ) -> Claim:
        """Claim a volume for a sandbox; None: for no VM, but for this process."""

    def adopt(
        self, target: volumes.TargetPath, sandbox: volumes.SandboxId, holder_pid: int
    ) -> Claim:
        """Adopt the claim whose lock that process holds for the sandbox, until `close`."""

    async def secrets(self, target: volumes.TargetPath) -> Mapping[str, str]:
        """The secrets of a volume that a sandbox has claimed; does not block."""

    def taking(
        self, record: Record, vm_id: str, sandbox: volumes.SandboxId
    ) -> AbstractAsyncContextManager[TakenImage]:
        """Take the image of a claimed volume in its cluster; it stays taken after the block. Does not block."""

    async def image_size(self, record: Record) -> int:
        """The size of a claimed volume's image now, in bytes; does not block."""

    async def give_back(self, record: Record, vm_id: str, sandbox: volumes.SandboxId) -> None:
        """End that, when the VM has closed the image; does not block."""

    def taken(self) -> Sequence[Taken]:
        """The images that were taken and not given back, also by processes before this one."""

    async def give_back_of_ended(self, taken: Taken) -> None:
        """End that, when the VM has ended for certain; does not block."""

    def recover(self, lost: LostClaims) -> None:
        """Have the claims of a VM again whose keeper has ended, or kill it; raises `kept_vm.VmKilled`."""

    def records(self) -> Sequence[Record]:
        """All readable records."""

    def claimed_for(self, vm: Process) -> Sequence[Record]:
        """Those whose claim, live or dead, names the VM."""
