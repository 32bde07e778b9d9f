"""`crust bundle`."""

from pathlib import Path

import click

from crust.inspection.options import RUN_DIR


@click.command("bundle")
@RUN_DIR
@click.option(
    "--state-dir",
    default="/var/lib/crust/block",
    show_default=True,
    help="A pool beside those that /etc/crust names.",
)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def command(run_dir: str, state_dir: str, file: Path) -> None:
    """Write a support archive, FILE.tar.gz, without secrets.

    Status, doctor's findings, settings, records, claims, mounts, versions and the last log lines. An existing FILE is
    not overwritten.

    Exit codes: 0 written, 1 it cannot be written, 2 the command cannot be understood.
    """
    import asyncio

    from crust.cli import bundle

    count = asyncio.run(bundle.write(file, bundle.parts(bundle.NodeFiles(run_dir, state_dir))))
    click.echo(f"{file}: {count} files; look at it before you send it: names and paths are in it")
