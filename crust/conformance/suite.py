"""Runs the suite: pytest underneath, with nothing of the directory, the settings and the plugins of who starts it."""

import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
import grpc
import pytest

from crust.conformance import capabilities, catalogue, connection, report_files, selection
from crust.conformance.case import of
from crust.conformance.options import Options
from crust.conformance.orchestrator.host_view import HostView, LinuxHost
from crust.conformance.plugin import Driver, Plugin
from crust.conformance.report import Report
from crust.conformance.results import Outcome as CaseOutcome
from crust.conformance.results import Results

CASES = Path(__file__).parent / "cases"
FILES = "*_cases.py"
_INTERRUPTED = 2
_NO_DRIVER = 3
_FAILING: frozenset[CaseOutcome] = frozenset({"failed"})
_FAILING_STRICT: frozenset[CaseOutcome] = frozenset({"failed", "warning", "note"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run: the exit code, and the cases by number."""

    exit_code: int
    results: Results = field(default_factory=Results)

    @property
    def passed(self) -> frozenset[str]:
        """Nothing was broken."""
        return self.results.numbers("passed")

    @property
    def failed(self) -> frozenset[str]:
        """A MUST was broken."""
        return self.results.numbers("failed")

    @property
    def warned(self) -> frozenset[str]:
        """A SHOULD was broken, and no MUST."""
        return self.results.numbers("warning")

    @property
    def noted(self) -> frozenset[str]:
        """Only what CSI leaves open."""
        return self.results.numbers("note")

    @property
    def skipped(self) -> dict[str, str]:
        """With the reasons."""
        return self.results.skipped()


def run(options: Options, host: HostView | None = None, *, quiet: bool = False) -> Outcome:
    """Run the cases against the driver. Exit codes: 0 no MUST is broken (strict: nothing is), 1 one is,
    2 interrupted, 3 no driver. Raises `errors.InvalidRequest` for a case that is not there.
    """
    known = {each.number for each in catalogue.cases()}
    numbers = selection.chosen(known, options.only, options.skip)
    report = Report(quiet=quiet)
    with connection.opened(options.socket, options.controller_socket) as opened:
        driver = Driver(opened, frozenset(), options)
        try:
            driver.probe()
            driver = Driver(opened, capabilities.of(opened, options), options)
        except (AssertionError, grpc.RpcError) as error:
            click.echo(f"the driver at {options.where} does not answer: {error}", err=True)
            return Outcome(_NO_DRIVER)
        plugin = Plugin(driver, host or LinuxHost(), numbers, report.result, report.remark)
        files = _forgotten(numbers) or [
            str(CASES)
        ]  # without any, pytest would look in this directory
        with _no_settings_of_others():
            ended = pytest.main([*files, *_ARGUMENTS], plugins=[plugin])
    report.summary(plugin.results, strict=options.strict)
    failing = _FAILING_STRICT if options.strict else _FAILING
    code = _exit_code(int(ended), plugin, failing)
    if options.junit is not None:
        report_files.write_junit(options.junit, plugin.results, failing)
    if options.json is not None:
        report_files.write_json(options.json, plugin.results, code)
    return Outcome(code, plugin.results)


def _exit_code(ended: int, plugin: Plugin, failing: frozenset[CaseOutcome]) -> int:
    if plugin.is_driver_gone:
        return _NO_DRIVER
    if ended not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return _INTERRUPTED
    return int(bool(plugin.results.numbers(*failing)))


def _forgotten(numbers: Collection[str]) -> list[str]:
    """The files of these cases, for pytest to import again: it explains only assertions of what it imports itself."""
    names = {each.__module__ for each in catalogue.case_functions() if of(each).number in numbers}
    return sorted(str(sys.modules.pop(name).__file__) for name in names)


@contextmanager
def _no_settings_of_others() -> Iterator[None]:
    """pytest takes options and plugins from the environment, which are for other tests."""
    theirs = {key: os.environ.pop(key) for key in list(os.environ) if key.startswith("PYTEST_")}
    try:
        yield
    finally:
        os.environ.update(theirs)


_ARGUMENTS = [
    f"--rootdir={CASES}",
    f"--config-file={os.devnull}",
    f"--override-ini=python_files={FILES}",
    "--noconftest",
    "--import-mode=importlib",
    "--disable-plugin-autoload",
    "--capture=no",
    "-pno:cacheprovider",
    "-pno:terminal",
    # they would warn, on a terminal that is not there, and look through all objects for it
    "-pno:unraisableexception",
    "-pno:threadexception",
]
