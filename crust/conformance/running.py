"""Runs the suite: pytest underneath, with nothing of the directory it is started in."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from crust.conformance.options import Options
from crust.conformance.plugin import Plugin
from crust.conformance.sight import Kernel, Sight

CASES = Path(__file__).parent / "cases"
FILES = "*_cases.py"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run: pytest's exit code, and the cases by number."""

    exit_code: int
    passed: frozenset[str]
    failed: frozenset[str]
    skipped: dict[str, str]


def run(options: Options, sight: Sight | None = None, *, quiet: bool = False) -> Outcome:
    """Run the cases against the driver. Exit codes: 0 all passed, 1 some failed, 3 no driver, 5 no such case."""
    plugin = Plugin(options, sight or Kernel())
    code = pytest.main(_arguments(options, quiet=quiet), plugins=[plugin])
    return Outcome(int(code), frozenset(plugin.passed), frozenset(plugin.failed), plugin.skipped)


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
        "--tb=short",
        "-qqq" if quiet else "-v",
    ]
    if options.junit is not None:
        arguments.append(f"--junit-xml={options.junit}")
    return arguments
