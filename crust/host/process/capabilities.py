"""What the kernel lets this process do, beyond being root (capabilities(7)).

Root in a container or a small VM often lacks some: asking first gives a better error than EPERM.
"""

from crust.host.process import oserrors

CAP_SYS_RESOURCE = 24


def effective() -> int:
    """The effective capabilities of the calling thread, as a bit mask."""
    with (
        oserrors.translating("cannot read the capabilities of this process"),
        open("/proc/thread-self/status", encoding="ascii", errors="replace") as file,
    ):
        for line in file:
            if line.startswith("CapEff:"):
                return int(line.split()[1], 16)
    return 0


def has_cap_sys_resource() -> bool:
    """Whether growing a mounted ext4 is allowed: EXT4_IOC_RESIZE_FS asks for it, xfs and btrfs do not."""
    return bool(effective() >> CAP_SYS_RESOURCE & 1)
