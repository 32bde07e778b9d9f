"""`crust keeper`."""

import json
import os
import sys
from pathlib import Path

import click

from crust.inspection import refusals

Held = tuple[str, tuple[int, ...]]
"""A claim's name, and its descriptors."""


def _held(value: str) -> Held:
    """Parse NAME=FD,FD, of inherited descriptors."""
    name, _, numbers = value.partition("=")
    try:
        fds = tuple(map(int, numbers.split(",")))
        for fd in fds:
            os.fstat(fd)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not NAME=FD,FD") from None
    except (OSError, OverflowError):
        why = f"a descriptor of {value!r} is not open: was it inherited?"
        raise click.BadParameter(why) from None
    return name, fds


@click.command("keeper")
@click.option(
    "--socket",
    type=click.Path(path_type=Path),
    required=True,
    help="The socket of the two processes, in a directory that only you can write to.",
)
@click.option("--pid", type=click.IntRange(min=1), help="The hypervisor's process.")
@click.option("--pidfd", type=click.IntRange(min=0), help="The same, by an inherited pidfd.")
@click.option(
    "--hold",
    type=_held,
    multiple=True,
    metavar="NAME=FD,FD",
    help="Inherited descriptors of a claim, lock and device, and your name for it. May be repeated.",
)
def command(socket: Path, pid: int | None, pidfd: int | None, hold: tuple[Held, ...]) -> None:
    """Hold claims for a hypervisor that takes no descriptors, until it ends: for runtimes in any language.

    Two processes in the background hold the descriptors and replace each other; they end after the hypervisor. If
    they run already, they get the descriptors of --hold. When this command has ended with 0, they hold all
    descriptors, and a line of JSON names the processes.

    Exit codes: 0 held, 1 refused or failed, 2 the command cannot be understood.
    """
    if (pid is None) == (pidfd is None):
        raise click.UsageError("give the hypervisor by --pid or by --pidfd")
    from crust.core import errors
    from crust.runtime_handler.blocking import keepers, process_of

    try:
        vm = keepers.process_of_pidfd(pidfd) if pidfd is not None else process_of(pid or 0)
        with keepers.start(socket, vm) as started:
            for name, fds in hold:
                started.hold(name, fds)
            held = started.held()
            state = {"pids": started.pids, "vm": started.vm_pid, "held": held}
    except errors.CrustError as error:
        refusals.tell(error)
        sys.exit(1)
    click.echo(json.dumps(state))
