"""Runs the suite: pytest underneath, with nothing of the directory it is started in."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from crust.conformance.host_view import HostView, LinuxHost
from crust.conformance.options import Options
from crust.conformance.plugin import Plugin

CASES = Path(__file__).parent / "cases"
FILES = "*_cases.py"
_NO_DRIVER = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run: pytest's exit code, and the cases by number."""

    exit_code: int
    passed: frozenset[str]
    failed: frozenset[str]
    skipped: dict[str, str]


def run(options: Options, host: HostView | None = None, *, quiet: bool = False) -> Outcome:
    """Run the cases against the driver. Exit codes: 0 none failed, 1 some failed, 2 no such case or
    interrupted, 3 no driver.
    """
    plugin = Plugin(options, host or LinuxHost())
    code = pytest.main(_arguments(options, quiet=quiet), plugins=[plugin])
    if code == pytest.ExitCode.USAGE_ERROR:
        code = pytest.ExitCode.INTERRUPTED
    code = _NO_DRIVER if plugin.is_driver_gone else int(code)
    return Outcome(code, frozenset(plugin.passed), frozenset(plugin.failed), plugin.skipped)


def _arguments(options: Options, *, quiet: bool) -> list[str]:
    arguments = [
        str(CASES),
        f"--rootdir={CASES}",
        f"--config-file={os.devnull}",
        f"--confcutdir={CASES}",
        f"--override-ini=python_files={FILES}",
        "--import-mode=importlib",
        "-pno:cacheprovider",
        "--disable-plugin-autoload",
        # One line per case, which the plugin writes, and no list of pytest's own at the end.
        "--override-ini=console_output_style=classic",
        "--tb=short",
        "--no-header",
        "-rN",
        "-qqq" if quiet else "-q",
    ]
    if options.junit is not None:
        arguments.append(f"--junit-xml={options.junit}")
    return arguments
