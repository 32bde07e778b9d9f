"""`crust uninstall`."""

import click


@click.command("uninstall")
def command() -> None:
    """Remove the files of `crust install`, but no settings and no volumes. Refused while a unit runs, or a volume is
    in use.

    Exit codes: 0 removed, 1 refused or failed.
    """
    from crust.cli import install

    install.run_uninstall()
