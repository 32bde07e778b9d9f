"""`crust config check`."""

import sys
from pathlib import Path

import click

from crust.cli.programs import PROGRAMS
from crust.inspection import Format
from crust.inspection.options import FORMAT


@click.group("config")
def command() -> None:
    """The settings of the daemons."""


@command.command("check")
@click.argument("programs", nargs=-1, type=click.Choice(list(PROGRAMS)))
@click.option(
    "--config",
    "path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The settings file. Default: /etc/crust/<program>.toml.",
)
@FORMAT
def config_check(programs: tuple[str, ...], path: Path | None, form: Format) -> None:
    """Show the settings that daemons would use, with their sources. Default: all programs with a file in /etc/crust.

    No daemon is started. A pool, or a volume in use, that this version of crust does not read is refused too. Exit
    codes: 0 the settings are good, 1 some are refused, 2 the command cannot be understood.
    """
    from crust.cli import config_check

    sys.exit(config_check.print_settings(programs, path, form))
