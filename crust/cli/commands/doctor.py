"""`crust doctor`."""

import sys

import click

from crust.inspection import Format
from crust.inspection.options import FORMAT, RUN_DIR


@click.command("doctor")
@RUN_DIR
@FORMAT
@click.option("--check", "only", multiple=True, metavar="NAME", help="Run only this check.")
def command(run_dir: str, form: Format, only: tuple[str, ...]) -> None:
    """Check this node: kernel, programs, settings, the kubelet's directories, sockets, versions.

    Exit codes: 0 no error was found (warnings may be), 1 an error, 2 the command cannot be understood.
    """
    import asyncio

    from crust.cli.doctor import examine
    from crust.cli.doctor.node import CHECKS
    from crust.inspection import screen

    unknown = [name for name in only if name not in CHECKS]
    if unknown:
        raise click.UsageError(f"no check is called {unknown[0]!r}: there are {', '.join(CHECKS)}")
    sys.exit(screen.print_once(asyncio.run(examine.examine(run_dir, only)), form))
