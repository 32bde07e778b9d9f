"""`crust handlers`."""

from typing import TYPE_CHECKING

import click

from crust.inspection.options import shows

if TYPE_CHECKING:  # it imports rich, which would slow down each start of a daemon
    from crust.inspection.show import Question


@click.command("handlers")
@shows
@click.option("--handler", default="", help="Only this handler.")
def command(handler: str) -> "Question":
    """List the registered runtime handlers of this node."""
    from crust.inspection import show

    return show.handlers(handler)
