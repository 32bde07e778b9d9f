"""`crust conformance --runtime`: its own flags, and none of those for drivers."""

import pytest
from click.testing import CliRunner, Result

from crust.cli.main import main
from crust.conformance import catalogue
from crust.conformance.options import RunOptions
from crust.conformance.results import Results
from crust.conformance.runtimes import suite


def run(*flags: str) -> Result:
    return CliRunner().invoke(main, ["conformance", "--runtime", *flags])


def test_list_needs_no_command_and_shows_every_case() -> None:
    ran = run("--list")
    assert ran.exit_code == 0
    assert [line.split()[0] for line in ran.stdout.splitlines()] == sorted(catalogue.cases("R"))


def test_list_shows_what_only_and_skip_leave() -> None:
    ran = run("--list", "--only", "R-301..R-303", "--skip", "302")
    assert [line.split()[0] for line in ran.stdout.splitlines()] == ["R-301", "R-303"]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("x", "--endpoint", "/s"), "--endpoint: not with --runtime"),
        (("x", "--profile", "1.12", "--log", "/dev/null"), "--log, --profile: not with --runtime"),
        (("--only", "C-101", "--list"), "begin with R"),
        (("--only", "R-999", "--list"), "no case has such a number"),
        (("--only", "R-101"), "--runtime needs the command"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(flags: tuple[str, ...], why: str) -> None:
    ran = run(*flags)
    assert (ran.exit_code, why in ran.output) == (2, True), ran.output


def test_flags_reach_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, RunOptions]] = []

    def record(command: str, options: RunOptions) -> Results:
        asked.append((command, options))
        return Results()

    monkeypatch.setattr(suite, "run", record)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert run("mine", "--only", "R-101", "--timeout-s", "7", "--strict").exit_code == 0
    assert asked.pop() == ("mine", RunOptions(only=("R-101",), timeout_s=7.0, strict=True))
    assert run("mine").exit_code == 0
    assert asked.pop() == ("mine", RunOptions(timeout_s=suite.TIMEOUT_S))


def test_case_for_runtimes_is_no_case_for_drivers() -> None:
    ran = CliRunner().invoke(main, ["conformance", "--list", "--only", "R-101"])
    assert ran.exit_code == 2
    assert "begin with C" in ran.output
