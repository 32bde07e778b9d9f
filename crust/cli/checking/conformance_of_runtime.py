"""`crust conformance --runtime`: runs the suite for runtimes and prints its lines."""

import os

import click

from crust import errors
from crust.conformance import selection
from crust.runtime_handler.conformance import suite
from crust.runtime_handler.conformance.case import CASES


def run(
    command: str,
    *,
    only: tuple[str, ...] = (),
    skip: tuple[str, ...] = (),
    list_cases: bool = False,
    timeout_s: float = suite.TIMEOUT_S,
) -> int:
    """Returns the exit code: 0 no MUST is broken, 1 some are, 3 the runtime does not register.

    Raises click.UsageError for what cannot be run.
    """
    try:
        chosen = selection.chosen([each.number for each in CASES], only, skip)
    except errors.InvalidRequest as error:
        raise click.UsageError(error.shown()) from error
    if list_cases:
        return _list(chosen)
    if not command:
        raise click.UsageError("--runtime needs the command that starts the runtime")
    if os.geteuid() != 0:
        raise click.UsageError("the cases attach loop devices and mount: run it as root")
    try:
        return 1 if suite.run(command, click.echo, only=chosen, timeout_s=timeout_s) else 0
    except errors.CrustError as error:
        click.echo(error.shown(), err=True)
        return 3


def _list(chosen: frozenset[str]) -> int:
    for each in sorted(CASES, key=lambda one: one.number):
        if each.number in chosen:
            needs = f" (needs {each.needs.name})" if each.needs else ""
            lacks = f" (without {each.lacks.name})" if each.lacks else ""
            click.echo(f"{each.number} {each.strength.value:<6} {each.title}{needs}{lacks}")
    return 0
