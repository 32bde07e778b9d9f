"""`crust status`."""

from typing import TYPE_CHECKING

import click

from crust.inspection.options import shows

if TYPE_CHECKING:  # it imports rich, which would slow down each start of a daemon
    from crust.inspection.show import Question


@click.command("status")
@shows
def command() -> "Question":
    """Show whether this node is ready: the proxy, its drivers (each is asked by Probe), handlers, volumes."""
    from crust.inspection import show

    return show.status
