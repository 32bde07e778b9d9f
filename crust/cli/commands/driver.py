"""`crust driver`, and its commands `init-pool` and `manifest`."""

from pathlib import Path
from typing import Any

import click

from crust.cli.programs import PROGRAMS
from crust.cli.programs.flags import CONFIG, Daemon, DaemonGroup, serve


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
    """`crust driver`, and the commands for its pool and its Kubernetes objects."""
    if context.invoked_subcommand is None:
        serve("driver", flags)


@command.command(
    "init-pool",
    cls=Daemon,
    model=PROGRAMS["driver"].model,
    only=("state_dir", "pool_id_file"),
)
@CONFIG
def init_pool(**flags: Any) -> None:
    """Make this node's pool, once, and print its id. An existing pool is not changed.

    The settings may be those of `crust driver` or of `crust node`.
    """
    from crust.cli.programs import daemons

    daemons.make_pool(flags)


@command.command()
@CONFIG
@click.option("--snapshots", is_flag=True, help="With csi-snapshotter and its classes.")
@click.option(
    "--resizer",
    is_flag=True,
    help="With csi-resizer; without node_deployment, on a cluster of one node.",
)
@click.option("--image", default="", help="The image of crust. Default: crust-csi:<version>.")
@click.option("--namespace", default="", help="Default: crust-system.")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
def manifest(config: Path | None, directory: Path, **choices: Any) -> None:
    """Write a DIRECTORY with the Kubernetes objects for settings, for `kubectl apply -k DIRECTORY`.

    Settings of `crust node` give the nodes' objects, settings of `crust driver` in mode controller the controller's.
    Default of --config: the settings of this node, or of deploy/kubernetes. The command calls no cluster.
    """
    from crust.cli.manifest import objects

    objects.write_manifest(config, directory, **choices)
