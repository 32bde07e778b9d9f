"""`crust device-writers`."""

import click


@click.command("device-writers")
@click.argument("device")
@click.option(
    "--but",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="PID",
    help="A process that may have the device open: your hypervisor. May be repeated.",
)
def command(device: str, but: tuple[int, ...]) -> None:
    """Say whether somebody can write to the block device DEVICE: for a runtime in any language whose guest reads it.

    A writer is a process that has it open for writing, a mounted filesystem, in any mount namespace, that can write,
    or a holder of O_EXCL that no mount explains; of the device, or of one that shares bytes with it. Run it as root
    in the host's PID namespace, before the hypervisor gets the device.

    Exit codes: 0 it has none, 1 it has one, which the error names, or not all processes can be seen, 2 the command
    cannot be understood.
    """
    from crust.host.block import devices, users

    source = devices.source(device)
    users.check(source, users.Purpose.GUEST_READS, but=but, published_below=())
    click.echo(f"{device} has no writer")
