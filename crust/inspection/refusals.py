"""Standard error of the commands: the one way to print an error or another program's sentence."""

import click

from crust.core import errors
from crust.core.printable import printable


def tell(refusal: errors.CrustError | str) -> None:
    """Print an error with its name, or a sentence, on one line: a driver, a guest or a process may have chosen it."""
    text = refusal.shown() if isinstance(refusal, errors.CrustError) else refusal
    click.echo(printable(text), err=True)
