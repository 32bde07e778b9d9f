"""`crust keeper`: the keeper of the SDK (`crust.runtime_handler.keepers`) for runtimes in other languages.

It starts the keeper, or finds the one that runs, gives it descriptors that it has inherited, and ends. The runtime
talks to the keeper over its socket afterwards (docs/runtime-author.md).
"""

import json
import os
import sys
from pathlib import Path

import click

Held = tuple[str, tuple[int, ...]]


def _held(value: str) -> Held:
    """NAME=FD,FD: descriptors that were inherited."""
    name, _, numbers = value.partition("=")
    try:
        fds = tuple(map(int, numbers.split(",")))
        for fd in fds:
            os.fstat(fd)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not NAME=FD,FD") from None
    except (OSError, OverflowError):
        why = f"of {value!r}, a descriptor is not open: was it inherited?"
        raise click.BadParameter(why) from None
    return name, fds


@click.command()
@click.option(
    "--socket",
    type=click.Path(path_type=Path),
    required=True,
    help="Where it listens, in a directory that only you can write to.",
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
def keeper(socket: Path, pid: int | None, pidfd: int | None, hold: tuple[Held, ...]) -> None:
    """Hold claims for as long as a hypervisor lives that takes no descriptors: for runtimes in any language.

    Two processes in the background hold the descriptors and replace each other; when the hypervisor has ended, they
    end. If they run already, they are given what --hold names. When this command has ended with 0, all is held, and
    a line of JSON says by which processes.

    Exit codes: 0 held, 1 refused or failed, 2 the command cannot be understood.
    """
    if (pid is None) == (pidfd is None):
        raise click.UsageError("give the hypervisor by --pid or by --pidfd")
    from crust.core import errors
    from crust.runtime_handler import keepers

    try:
        vm = keepers.pid_of(pidfd) if pidfd is not None else pid or 0
        with keepers.start(socket, vm, pidfd) as started:
            for name, fds in hold:
                started.hold(name, fds)
            held = started.held()
            state = {"pids": started.pids, "vm": started.vm_pid, "held": held}
    except errors.CrustError as error:
        click.echo(error.shown(), err=True)
        sys.exit(1)
    click.echo(json.dumps(state))
