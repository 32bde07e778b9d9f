"""The example microVM runtime keeps the duties of specs/handoff.md: all cases of `crust conformance --runtime`."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from crust.cli.main import main
from crust.conformance import catalogue

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
    "R-220",  # SUB_PATH,
    "R-307",  # and FREEZE
}
"""Cases for runtimes that lack a feature."""
NEED_A_KEEPER = {"R-110", "R-111", "R-112", "R-113"}


@pytest.mark.parametrize("cases", ["R-100..R-199", "R-200..R-299", "R-300..R-399"])
def test_example_microvm_runtime_breaks_no_duty(tmp_path: Path, cases: str) -> None:
    report = tmp_path / "report.json"
    flags = ["--runtime", COMMAND, "--only", cases, "--timeout-s", "300", "--json", str(report)]
    ran = CliRunner().invoke(main, ["conformance", *flags])
    outcomes = {case["number"]: case["outcome"] for case in json.loads(report.read_text())["cases"]}
    assert outcomes == {
        number: "skipped" if number in NOT_OFFERED_BY_ALL | NEED_A_KEEPER else "passed"
        for number in catalogue.cases("R")
        if number[2] == cases[2]
    }, ran.output
    assert ran.exit_code == 0


def test_its_keepers_break_no_duty(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    flags = ["--runtime", f"{COMMAND} --claims keeper", "--only", ",".join(sorted(NEED_A_KEEPER))]
    ran = CliRunner().invoke(
        main, ["conformance", *flags, "--timeout-s", "300", "--json", str(report)]
    )
    outcomes = {case["number"]: case["outcome"] for case in json.loads(report.read_text())["cases"]}
    assert outcomes == dict.fromkeys(NEED_A_KEEPER, "passed"), ran.output
