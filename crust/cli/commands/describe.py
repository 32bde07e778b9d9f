"""`crust describe`."""

import click

from crust.inspection.options import Question, shows


@click.command("describe")
@shows
@click.argument("volume")
def command(volume: str) -> Question:
    """Show a deferred volume, by its PersistentVolume, its pod, its id, its target path or the name of its entry."""
    from crust.inspection import show

    return show.describe(volume)
