"""The description of a VM, and QEMU's command line for it.

The choices are measured: q35 unplugs in 0.1 s by ACPI where native PCIe takes 6 s; an ELF kernel and qboot save one
second of firmware; `mitigations=off` and the like are set only for the emulated processor, which does not speculate.
One root port is one hot-plug slot, and each costs boot time.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from examples.kata.guest import image

QEMU = Path("/usr/bin/qemu-system-x86_64")
VIRTIOFSD = Path("/usr/lib/qemu/virtiofsd")
VOLUME_SLOTS = 32
"""How many volumes a sandbox can have. 64 work too, and cost a second of boot time where it is emulated."""
_FIRST_PORT = 0x10
_QBOOT = Path("/usr/share/qemu/qboot.rom")
# SysRq works on the console alone, so only the host can press it: to see why a guest hangs, or to crash it.
_KERNEL = "console=ttyS0 quiet panic=-1 sysrq_always_enabled"
# A kernel that boots waits for ticks, and panics if they are late ("IO-APIC + timer doesn't work"), as they are in
# emulation on a busy host. Under KVM it does not wait for them anyway.
# The accounts of pressure (PSI) are written at each switch of tasks, so several times for one request to a disk.
_EMULATED = "mitigations=off cryptomgr.notests nokaslr no_timer_check psi=0"
# Port 0 is a console's, and not used. Each port that a device could have is two queues, and QEMU's main loop looks at
# each queue of each device whenever it wakes up: at least twice for a synced write.
_PORTS = 2
_SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"

Acceleration = Literal["kvm", "tcg"]
ClaimHolder = Literal["hypervisor", "keeper"]
"""The holder of a VM's claims: QEMU, or a process beside it, as for a hypervisor that takes no descriptors."""


@dataclass(frozen=True, slots=True)
class Share:
    """A host directory shared into the guest under a tag; mount it with fstype `9p` or `virtiofs`.

    9p needs the image flavour `standard`. `cache` is virtiofsd's (`auto`, `none`, `always`); a 9p client
    takes its cache as a mount option instead.
    """

    tag: str
    path: Path
    kind: Literal["9p", "virtiofs"]
    cache: str = "auto"
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """A VM to start. `name` appears in errors and in the process list."""

    name: str
    image: image.GuestImage
    acceleration: Acceleration = "tcg"
    memory_mib: int = 256
    volume_slots: int = VOLUME_SLOTS
    shares: tuple[Share, ...] = field(default=())
    claims: ClaimHolder = "hypervisor"


def command_line(
    spec: MachineSpec, directory: Path, identity: str, *, control_fd: int, agent_fd: int
) -> list[str]:
    """QEMU's arguments; QEMU inherits the two listening sockets."""
    return [
        *(str(QEMU), "-name", f"crust-{spec.name}", "-uuid", identity),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-sandbox", _SANDBOX, "-pidfile", str(directory / "qemu.pid")),
        *_machine(spec),
        *_boot(spec),
        *("-chardev", f"socket,id=control,server=on,wait=off,fd={control_fd}"),
        *("-mon", "chardev=control,mode=control"),
        *("-chardev", f"socket,id=agent,server=on,wait=off,fd={agent_fd}"),
        *("-device", f"virtio-serial-pci,max_ports={_PORTS}"),
        *("-device", "virtserialport,chardev=agent,name=crust.agent"),
        *(
            "-chardev",
            f"pipe,id=console,path={_value(directory)}/console",
            "-serial",
            "chardev:console",
        ),
        *_slots(spec.volume_slots),
        *(argument for share in spec.shares for argument in _share(share, directory)),
    ]


def virtiofsd(share: Share, fd: int) -> list[str]:
    """The arguments of the C virtiofsd, which inherits its listening socket; libfuse ends an option at a comma."""
    source = str(share.path).replace("\\", r"\\").replace(",", r"\,")
    options = f"source={source},cache={share.cache},sandbox=chroot"
    return [str(VIRTIOFSD), f"--fd={fd}", "-o", options, "-f"]


def _value(path: Path) -> str:
    """A path as the value of an option of QEMU, which ends at a single comma."""
    return str(path).replace(",", ",,")


def share_socket(share: Share, directory: Path) -> Path:
    """Where virtiofsd serves a share."""
    return directory / f"fs-{share.tag}.sock"


def _machine(spec: MachineSpec) -> list[str]:
    # virtiofsd maps the guest's memory, so the memory must be a file that both can open.
    shared = any(share.kind == "virtiofs" for share in spec.shares)
    backend = f"memory-backend-memfd,id=memory,size={spec.memory_mib}M,share=on"
    memory = ("-object", backend) if shared else ()
    machine = f"q35,accel={spec.acceleration}" + (",memory-backend=memory" if shared else "")
    processor = "host" if spec.acceleration == "kvm" else "qemu64,+rdrand"
    return ["-M", machine, "-cpu", processor, "-m", f"{spec.memory_mib}M", *memory]


def _boot(spec: MachineSpec) -> list[str]:
    tuning = _EMULATED if spec.acceleration == "tcg" else ""
    firmware = ("-bios", str(_QBOOT)) if _QBOOT.exists() else ()
    return [
        *firmware,
        *("-kernel", str(spec.image.vmlinux), "-initrd", str(spec.image.initramfs)),
        *("-append", f"{_KERNEL} {tuning}".strip()),
    ]


def _slots(count: int) -> list[str]:
    """Root ports, eight to a device of the root bus, which has 32."""
    arguments = []
    for number in range(count):
        place = f"addr={_FIRST_PORT + number // 8:#x}.{number % 8},multifunction=on"
        arguments += [
            "-device",
            f"pcie-root-port,id=slot{number},chassis={number + 1},slot={number + 1},{place}",
        ]
    return arguments


def _share(share: Share, directory: Path) -> list[str]:
    if share.kind == "virtiofs":
        device = f"vhost-user-fs-pci,chardev=fs-{share.tag},tag={share.tag}"
        channel = f"socket,id=fs-{share.tag},path={_value(share_socket(share, directory))}"
        return ["-chardev", channel, "-device", device]
    options = ",readonly=on" if share.read_only else ""
    backend = f"local,id=fs-{share.tag},path={_value(share.path)},security_model=none{options}"
    return [
        "-fsdev",
        backend,
        "-device",
        f"virtio-9p-pci,fsdev=fs-{share.tag},mount_tag={share.tag}",
    ]
