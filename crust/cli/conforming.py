"""`crust conformance`: flags to options, and what is missing said in words."""

import importlib.util
from pathlib import Path
from typing import Any

import click

from crust import errors
from crust.conformance import options


def run(*, endpoint: str, parameters: Path | None, **flags: Any) -> int:
    """Run the suite; `flags` are the other fields of `Options`. Returns the exit code.

    Raises click.ClickException for what cannot be used.
    """
    if importlib.util.find_spec("pytest") is None:
        raise click.ClickException("pytest is not installed: pip install 'crust[conformance]'")
    from crust.conformance import running

    try:
        chosen = options.Options(
            socket=options.socket_of(endpoint),
            parameters=options.parameters_of(parameters),
            **flags,
        )
        return running.run(chosen).exit_code
    except errors.InvalidRequest as err:
        raise click.ClickException(str(err)) from err
