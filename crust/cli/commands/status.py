"""`crust status`."""

import click

from crust.inspection.options import Question, shows


@click.command("status")
@shows
def command() -> Question:
    """Show whether this node is ready: the proxy, its drivers (each is asked by Probe), handlers, volumes."""
    from crust.inspection import show

    return show.status
