"""`crust-conformance`, for drivers and for runtimes: turns flags into options, and checks them before a case runs.

A flag of csi-sanity that means the same as one of ours is taken for it, with one dash or two, as Go's programs do.
"""

import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

import crust
from crust.core import errors
from crust.core.printable import printable
from crust_conformance import catalogue, options

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_NEW_FILE = click.Path(dir_okay=False, resolve_path=True, path_type=Path)
_SHARED_FLAGS = {"only", "skip", "focus", "list_cases", "timeout_s", "strict", "junit", "json"}
"""The flags for drivers that serve for a runtime too."""
_CHOOSING = ("only", "skip", "focus")


_CSI_SANITY_FLAGS = {
    "csi.endpoint": "--endpoint",
    "csi.controllerendpoint": "--controller-endpoint",
    "csi.mountdir": "--target-root",
    "csi.junitfile": "--junit",
    "ginkgo.junit-report": "--junit",
    "ginkgo.json-report": "--json",
    "ginkgo.focus": "--focus",
}
_GO_FLAG = re.compile(r"^--?([a-z]+\.[a-z-]+)(?==|$)")


class _Command(click.Command):
    """Takes csi-sanity's flags, and prints the error of a refused command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words of the command line."""
        return super().parse_args(ctx, [_GO_FLAG.sub(_ours, word) for word in args])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. An error of crust is its sentence, and the exit code 2 if the request is wrong, else 1."""
        try:
            return super().invoke(ctx)
        except errors.CrustError as error:
            click.echo(printable(error.shown()), err=True)
            sys.exit(2 if isinstance(error, errors.InvalidRequest) else 1)


def _ours(flag: re.Match[str]) -> str:
    return _CSI_SANITY_FLAGS.get(flag[1], flag[0])


@click.command(
    "crust-conformance", cls=_Command, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.option(
    "--endpoint",
    help="The driver's socket, unix:///…/csi.sock.",
)
@click.option(
    "--controller-endpoint",
    help="The socket of a separate controller part; --endpoint is then the node part's.",
)
@click.option(
    "--profile",
    type=click.Choice(["1.12", "1.13"]),
    help="The driver's version of CSI. Default: by its capabilities.",
)
@click.option(
    "--target-root",
    type=click.Path(file_okay=False, resolve_path=True, path_type=Path),
    default="/var/lib/kubelet",
    help="The directory for staging and target paths. Default: /var/lib/kubelet.",
)
@click.option(
    "--junit",
    type=_NEW_FILE,
    help="The file for a report (JUnit XML).",
)
@click.option(
    "--json",
    type=_NEW_FILE,
    help="The file for a report (JSON: every case, clause, request and answer).",
)
@click.option(
    "--parameters",
    type=_FILE,
    help="A TOML file with the parameters, secrets and sizes of the driver's volumes.",
)
@click.option(
    "--log",
    type=_FILE,
    help="The driver's log, which is searched for planted secrets.",
)
@click.option("--restart-command", default="", help="A command that restarts the driver.")
@click.option("--only", multiple=True, metavar="C-101", help="Run these: C-101, C-100..C-199.")
@click.option(
    "--focus",
    multiple=True,
    metavar="REGEX",
    help="Run the cases whose number or rule matches.",
)
@click.option("--skip", multiple=True, metavar="C-101", help="Run all but these cases.")
@click.option(
    "--strict", is_flag=True, help="Fail also on a broken SHOULD, and beyond the specification."
)
@click.option("--list", "list_cases", is_flag=True, help="List the cases, and do not run them.")
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="The deadline of each call.",
)
@click.option(
    "--runtime",
    metavar="COMMAND",
    is_flag=False,
    flag_value="",
    help="Check a runtime against the contract of the handoff directory instead, with --only, --skip, --focus, "
    "--list, --strict, --junit, --json and --timeout-s. Default of --timeout-s then: 120.",
)
@click.version_option(crust.__version__, prog_name="crust-conformance")
@click.pass_context
def main(context: click.Context, /, runtime: str | None, **flags: Any) -> None:
    """Check any CSI driver against the rules of the specification.

    Run it as root where the driver's mounts are visible. Exit codes: 0 no MUST is broken, 1 a MUST is broken, 2 the
    command cannot be understood or was interrupted, 3 the driver does not answer.

    Flags of csi-sanity that mean the same are taken too: --csi.endpoint, --csi.controllerendpoint, --csi.mountdir
    (--target-root, which must exist), --csi.junitfile, --ginkgo.junit-report, --ginkgo.json-report, --ginkgo.focus.
    """
    if runtime is None:
        sys.exit(of_driver(**flags))
    chosen = {
        name: value
        for name, value in flags.items()
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    if misplaced := sorted(chosen.keys() - _SHARED_FLAGS):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in misplaced)
        raise click.UsageError(f"{names}: not with --runtime, but for drivers")
    sys.exit(of_runtime(runtime, **chosen))


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
        return _list("C", options.RunOptions(**{name: flags[name] for name in _CHOOSING}))
    if endpoint is None:
        raise click.UsageError("give the driver's socket: --endpoint unix:///…/csi.sock")
    chosen = options.Options(
        socket=options.socket_of(endpoint),
        controller_socket=options.socket_of(controller_endpoint) if controller_endpoint else "",
        parameters=options.parameters_of(parameters),
        **flags,
    )
    try:
        os.scandir(chosen.target_root).close()
    except OSError as err:
        raise errors.InvalidRequest(
            f"volumes cannot be staged and published below {chosen.target_root}",
            why=os.strerror(err.errno or 0),
            hint="give the kubelet's root with --target-root, or any directory that the driver sees",
        ) from err
    with _checked_run("C", chosen):
        from crust_conformance import suite  # `--list` needs no pytest

        for path in filter(None, (chosen.socket, chosen.controller_socket)):
            _tell_if_away(path, chosen.timeout_s)
        return suite.run_suite(chosen).exit_code


def of_runtime(command: str, *, list_cases: bool = False, **flags: Any) -> int:
    """Run the suite for runtimes; `flags` are fields of `RunOptions`. Returns the exit code.

    Raises click.UsageError, `errors.InvalidRequest`.
    """
    if list_cases:
        return _list("R", options.RunOptions(**{name: flags.get(name, ()) for name in _CHOOSING}))
    if not command:
        raise click.UsageError("--runtime needs the command that starts the runtime")
    if os.geteuid() != 0:
        raise click.UsageError("the cases attach loop devices and mount: run it as root")
    chosen = options.RunOptions(**{"timeout_s": options.RUNTIME_TIMEOUT_S, **flags})
    with _checked_run("R", chosen):
        from crust_conformance.runtimes import suite

        return suite.run_suite(command, chosen).exit_code


@contextmanager
def _checked_run(kind: str, chosen: options.RunOptions) -> Iterator[None]:
    """Check that the cases exist and the reports can be written, then run. Raises `errors.InvalidRequest`.

    SIGTERM ends the run as SIGINT does: the suite removes the objects of the running case.
    """
    catalogue.chosen(catalogue.cases(kind), chosen.only, chosen.skip, chosen.focus)
    for report in filter(None, (chosen.junit, chosen.json)):
        _check_writable(report)
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _list(kind: str, chosen: options.RunOptions) -> int:
    """Print a line for each chosen case."""
    cases = catalogue.cases(kind)
    for number in sorted(catalogue.chosen(cases, chosen.only, chosen.skip, chosen.focus)):
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
        if number := connection.connect_ex(path):
            why = os.strerror(number)
            click.echo(f"no driver at {path} ({why}), waiting {timeout_s:g} s", err=True)
