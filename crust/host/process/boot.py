"""This boot of this machine."""

from crust.host.process import oserrors


def boot_id() -> str:
    """The kernel's random id of this boot (random(4)): a record with another one is from before a reboot."""
    with (
        oserrors.translating("cannot read the boot id"),
        open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file,
    ):
        return file.read().strip()
