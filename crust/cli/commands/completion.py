"""`crust completion`."""

from typing import get_args

import click

from crust.cli.shells import Shell, completion_script


@click.command("completion")
@click.argument("shell", type=click.Choice(get_args(Shell)))
def command(shell: Shell) -> None:
    """Print the completion script of a shell: eval "$(crust completion bash)"."""
    click.echo(completion_script(shell))
