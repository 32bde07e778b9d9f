"""`crust handlers`."""

import click

from crust.inspection.options import Question, shows


@click.command("handlers")
@shows
@click.option("--handler", default="", help="Only this handler.")
def command(handler: str) -> Question:
    """List the registered runtime handlers of this node."""
    from crust.inspection import show

    return show.handlers(handler)
