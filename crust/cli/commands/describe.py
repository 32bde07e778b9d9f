"""`crust describe`."""

from typing import TYPE_CHECKING

import click

from crust.inspection.options import shows

if TYPE_CHECKING:  # it imports rich, which would slow down each start of a daemon
    from crust.inspection.show import Question


@click.command("describe")
@shows
@click.argument("volume")
def command(volume: str) -> "Question":
    """Show a deferred volume, by its PersistentVolume, its pod, its id, its target path or the name of its entry."""
    from crust.inspection import show

    return show.describe(volume)
