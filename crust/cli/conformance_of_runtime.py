"""`crust conformance --runtime`: runs the suite for runtimes and prints its lines."""

import os

import click

from crust import errors
from crust.runtime_handler.conformance import suite


def run(command: str) -> int:
    """Returns the exit code: 0 no MUST is broken, 1 some are, 3 the runtime does not register."""
    if os.geteuid() != 0:
        raise click.UsageError("the cases attach loop devices and mount: run it as root")
    try:
        return 1 if suite.run(command, click.echo) else 0
    except errors.CrustError as error:
        click.echo(error.shown(), err=True)
        return 3
