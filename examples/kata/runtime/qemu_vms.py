"""`ports.Vms` on `examples.kata.vm.machine`: starts VMs with this daemon's image and accelerator."""

from dataclasses import dataclass
from pathlib import Path

from examples.kata.guest.image import GuestImage
from examples.kata.vm import faults, machine, spec


@dataclass(frozen=True, slots=True)
class QemuVms:
    """`ports.Vms`. `adopt` uses no field: a VM keeps what it was started with."""

    image: GuestImage
    acceleration: spec.Acceleration
    claims: spec.ClaimHolder = "hypervisor"
    boot_timeout_s: float = machine.BOOT_S

    async def start(self, name: str, directory: Path) -> machine.Machine:
        """See `machine.start`; raises VmStartFailed also if the directory cannot be used."""
        wanted = spec.MachineSpec(
            name, self.image, acceleration=self.acceleration, claims=self.claims
        )
        try:
            return await machine.start(wanted, directory, boot_timeout_s=self.boot_timeout_s)
        except OSError as err:
            raise faults.VmStartFailed(directory, str(err), "") from err

    async def adopt(self, directory: Path) -> machine.Machine:
        """See `machine.adopt`."""
        return await machine.adopt(directory)

    async def destroy(self, directory: Path) -> bool:
        """See `machine.destroy`."""
        return await machine.destroy(directory)
