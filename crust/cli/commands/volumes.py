"""`crust volumes`."""

import click

from crust.inspection.options import Question, shows


@click.command("volumes")
@shows
@click.option("--driver", default="", help="Only volumes of this driver.")
@click.option("--handler", default="", help="Only volumes for this runtime handler.")
@click.option("--state", default="", help="published, claimed, mounted, error or unreadable.")
@click.option("--target", default="", help="Only volumes at or below this path.")
@click.option("--pod", default="", help="Of a pod: NAMESPACE/NAME, NAME, or the start of its UID.")
def command(**filters: str) -> Question:
    """List the deferred volumes of this node."""
    from crust.inspection import show

    return show.volumes(**filters)
