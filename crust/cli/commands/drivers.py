"""`crust drivers`."""

import click

from crust.inspection.options import Question, shows


@click.command("drivers")
@shows
@click.option("--driver", default="", help="Only this driver.")
@click.option("--state", type=click.Choice(["", "ready", "not-ready"]), default="")
def command(driver: str, state: str) -> Question:
    """List the CSI drivers of this node; each is asked by Probe, within five seconds."""
    from crust.inspection import show

    return show.drivers(driver, state)
