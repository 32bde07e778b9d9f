"""`crust explain`."""

import click


@click.command("explain")
@click.argument("name")
def command(name: str) -> None:
    """Explain an error: its meaning, its retries and its remedy: `crust explain MountFailed`."""
    from crust.cli import explain

    explain.print_page(name)
