"""`crust driver`, and its command `init-pool`."""

from typing import Any

import click

from crust.cli.programs import PROGRAMS
from crust.cli.programs.flags import CONFIG, Daemon, DaemonGroup


@click.group(
    "driver",
    cls=DaemonGroup,
    model=PROGRAMS["driver"].model,
    help=PROGRAMS["driver"].help,
    invoke_without_command=True,
)
@click.pass_context
@CONFIG
def command(context: click.Context, /, **flags: Any) -> None:
    """`crust driver`, and the command for its pool."""
    if context.invoked_subcommand is None:
        from crust.cli.programs import daemons

        daemons.serve("driver", flags)


@command.command(
    "init-pool", cls=Daemon, model=PROGRAMS["driver"].model, only=("state_dir", "pool_id_file")
)
@CONFIG
@click.option("--pool", default="default", help="One of the settings' further pools, by its name.")
def init_pool(pool: str, **flags: Any) -> None:
    """Make this node's pool, once, and print its id. An existing pool is not changed.

    The settings may be those of `crust driver` or of `crust node`.
    """
    from crust.cli.programs import daemons

    daemons.make_pool(pool, flags)
