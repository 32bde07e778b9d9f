"""`crust conformance`, for drivers and for runtimes: turns flags into options, and checks them before a case runs."""

import importlib.util
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from crust.conformance import catalogue, options
from crust.core import errors


def of_driver(
    *,
    endpoint: str | None,
    controller_endpoint: str | None,
    parameters: Path | None,
    list_cases: bool,
    **flags: Any,
) -> int:
    """Run the suite for drivers; `flags` are the other fields of `Options`. Returns the exit code.

    Raises click.UsageError, `errors.InvalidRequest`.
    """
    if list_cases:
        return _list("C", flags["only"], flags["skip"])
    if endpoint is None:
        raise click.UsageError("give the driver's socket: --endpoint unix:///…/csi.sock")
    chosen = options.Options(
        socket=options.socket_of(endpoint),
        controller_socket=options.socket_of(controller_endpoint) if controller_endpoint else "",
        parameters=options.parameters_of(parameters),
        **flags,
    )
    if not chosen.target_root.is_dir():
        raise errors.InvalidRequest(
            f"volumes cannot be staged and published below {chosen.target_root}",
            why="it is no directory",
            hint="give the kubelet's root with --target-root, or any directory that the driver sees",
        )
    with _checked_run("C", chosen):
        from crust.conformance import suite

        for path in filter(None, (chosen.socket, chosen.controller_socket)):
            _tell_if_away(path, chosen.timeout_s)
        return suite.run_suite(chosen).exit_code


def of_runtime(command: str, *, list_cases: bool = False, **flags: Any) -> int:
    """Run the suite for runtimes; `flags` are fields of `RunOptions`. Returns the exit code.

    Raises click.UsageError, `errors.InvalidRequest`.
    """
    if list_cases:
        return _list("R", flags.get("only", ()), flags.get("skip", ()))
    if not command:
        raise click.UsageError("--runtime needs the command that starts the runtime")
    if os.geteuid() != 0:
        raise click.UsageError("the cases attach loop devices and mount: run it as root")
    chosen = options.RunOptions(**{"timeout_s": options.RUNTIME_TIMEOUT_S, **flags})
    with _checked_run("R", chosen):
        from crust.conformance.runtimes import suite

        return suite.run_suite(command, chosen).exit_code


@contextmanager
def _checked_run(kind: str, chosen: options.RunOptions) -> Iterator[None]:
    """Check that the cases exist and the reports can be written, then run. Raises `errors.InvalidRequest`.

    SIGTERM ends the run as SIGINT does: the suite removes the objects of the running case.
    """
    if importlib.util.find_spec("pytest") is None:
        raise click.UsageError("pytest is not installed: pip install 'crust-csi[conformance]'")
    catalogue.chosen(catalogue.cases(kind), chosen.only, chosen.skip)
    for report in filter(None, (chosen.junit, chosen.json)):
        _check_writable(report)
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _list(kind: str, only: tuple[str, ...], skip: tuple[str, ...]) -> int:
    """Print a line for each chosen case."""
    cases = catalogue.cases(kind)
    for number in sorted(catalogue.chosen(cases, only, skip)):
        case = cases[number]
        needs = f" (needs {', '.join(case.needs)})" if case.needs else ""
        click.echo(f"{number} {case.strength:<6} {case.rule}{needs}")
    return 0


def _check_writable(report: Path) -> None:
    """Check before the run, which takes minutes, that the report can be written."""
    try:
        with tempfile.TemporaryFile(dir=report.parent):
            pass
    except OSError as err:
        raise errors.InvalidRequest(
            f"the report {report} cannot be written",
            why=f"{report.parent}: {err.strerror}",
            hint="create the directory, or choose another one",
        ) from err


def _tell_if_away(path: str, timeout_s: float) -> None:
    """Print the socket that the suite waits for: the driver may be starting."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(path)
        except OSError as err:
            why = err.strerror or str(err)
            click.echo(f"no driver at {path} ({why}), waiting {timeout_s:g} s", err=True)
