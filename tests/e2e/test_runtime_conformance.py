"""The example microVM runtime keeps the duties of specs/handoff.md: all cases of `crust conformance --runtime`."""

import sys

import pytest
from click.testing import CliRunner

from crust.cli.main import main
from crust.runtime_handler.conformance.case import CASES

pytestmark = [pytest.mark.vm, pytest.mark.timeout(1800)]

COMMAND = (
    f"{sys.executable} -m examples.kata conformance --handlers-socket {{registry}} "
    "--volumes-root {directory}/volumes --run-dir {directory}/kata --boot-timeout-s 240"
)
NOT_OFFERED_BY_ALL = {
    "R-212",  # it has READ_ONLY,
    "R-213",  # IO_LIMITS,
    "R-214",  # GROUP,
    "R-215",
    "R-217",  # FORMAT,
    "R-219",  # LUKS,
    "R-307",  # and FREEZE
}
"""Cases for runtimes that lack a feature."""


@pytest.mark.parametrize("cases", ["R-100..R-199", "R-200..R-299", "R-300..R-399"])
def test_example_microvm_runtime_breaks_no_duty(cases: str) -> None:
    flags = ["--runtime", COMMAND, "--only", cases, "--timeout-s", "300"]
    ran = CliRunner().invoke(main, ["conformance", *flags])
    lines = [line.split() for line in ran.stdout.splitlines() if line.startswith("R-")]
    of_range = {each.number for each in CASES if each.number[2] == cases[2]}
    assert {line[0] for line in lines} == of_range, ran.output
    assert {line[0] for line in lines if line[1] == "skipped"} == of_range & NOT_OFFERED_BY_ALL
    assert {line[1] for line in lines} <= {"passed", "skipped"}, ran.output
    assert ran.exit_code == 0
