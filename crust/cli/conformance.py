"""`crust conformance`: flags to options; reports what is missing before a case runs."""

import importlib.util
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from crust import errors
from crust.conformance import options


def run(*, endpoint: str, parameters: Path | None, junit: Path | None, **flags: Any) -> int:
    """Run the suite; `flags` are the other fields of `Options`. Returns the exit code.

    Raises click.ClickException for what cannot be used.
    """
    if importlib.util.find_spec("pytest") is None:
        raise click.ClickException("pytest is not installed: pip install 'crust-csi[conformance]'")
    from crust.conformance import suite

    try:
        chosen = options.Options(
            socket=options.socket_of(endpoint),
            parameters=options.parameters_of(parameters),
            junit=_writable(junit),
            **flags,
        )
    except errors.InvalidRequest as err:
        raise click.UsageError(err.shown()) from err
    _tell_if_away(chosen.socket, chosen.timeout_s)
    with _termination_as_interrupt():
        return suite.run(chosen).exit_code


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """SIGTERM ends a run as SIGINT does: the suite removes what the running case has created."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _writable(junit: Path | None) -> Path | None:
    """The report is written after minutes; check before the run that it can be."""
    if junit is None:
        return None
    try:
        junit.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=junit.parent):
            return junit
    except OSError as err:
        raise click.UsageError(f"the report {junit} cannot be written: {err.strerror}") from err


def _tell_if_away(path: str, timeout_s: float) -> None:
    """Say which socket the suite waits for: the driver may be starting."""
    with socket.socket(socket.AF_UNIX) as one:
        try:
            one.connect(path)
        except OSError as err:
            why = err.strerror or str(err)
            click.echo(f"no driver at {path} ({why}), waiting {timeout_s:g} s", err=True)
