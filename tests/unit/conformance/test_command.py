"""`crust conformance` for drivers and runtimes: flags, parameters, restart command, a driver without an answer."""

import json
import os
import signal
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from crust.cli.main import main
from crust.conformance import catalogue, options, suite
from crust.conformance.capabilities import CREATE
from crust.conformance.cases.disturbed_cases import run_restart_command
from crust.conformance.options import Options, Parameters, RunOptions
from crust.conformance.results import Results
from crust.conformance.runtimes import suite as suite_of_runtimes
from crust.core import errors
from tests.support.memory_csi.driver import MemoryDriver, MemoryHost, serving
from tests.support.memory_csi.state import Code, Refused


def test_a_parameters_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "parameters.toml"
    path.write_text('size_bytes = 5\nfs_types = ["xfs"]\n[parameters]\ntype = "fast"\n')
    given = options.parameters_of(path)
    assert (given.size_bytes, given.fs_types, given.parameters) == (5, ("xfs",), {"type": "fast"})
    assert options.parameters_of(None) == options.Parameters()


@pytest.mark.parametrize("text", ["size = 5\n", "size_bytes = 0\n", "no toml"])
def test_a_parameters_file_that_is_wrong_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "parameters.toml"
    path.write_text(text)
    with pytest.raises(errors.InvalidRequest, match="cannot be used"):
        options.parameters_of(path)


def test_an_endpoint_is_a_socket() -> None:
    assert options.socket_of("unix:///a/csi.sock") == "/a/csi.sock"
    assert options.socket_of("/a/csi.sock") == "/a/csi.sock"
    for endpoint in ("tcp://localhost:1", "csi.sock", f"/{'a' * 200}"):
        with pytest.raises(errors.InvalidRequest):
            options.socket_of(endpoint)


def test_missing_driver_is_reported(tmp_path: Path) -> None:
    arguments = ["conformance", f"--endpoint=unix://{tmp_path}/csi.sock"]
    arguments += [f"--target-root={tmp_path}", "--timeout-s=0.2"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 3
    assert f"no driver at {tmp_path}/csi.sock (No such file or directory)" in result.output
    assert f"the driver at {tmp_path}/csi.sock does not answer" in result.output


def test_invalid_endpoint_is_reported(tmp_path: Path) -> None:
    arguments = ["conformance", "--endpoint=tcp://a", f"--target-root={tmp_path}"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "give unix:///path/of/csi.sock" in result.output


@pytest.mark.parametrize("place", ["{tmp}/file", "{tmp}/not-there", "/proc/sys"])
@pytest.mark.parametrize("option", ["--junit", "--json"])
def test_unwritable_report_is_refused_at_once(tmp_path: Path, place: str, option: str) -> None:
    (tmp_path / "file").touch()
    report = f"{place.format(tmp=tmp_path)}/report"
    arguments = ["conformance", f"--endpoint={tmp_path}/csi.sock", f"--target-root={tmp_path}"]
    result = CliRunner().invoke(main, [*arguments, f"{option}={report}"])
    assert result.exit_code == 2
    assert f"the report {report} cannot be written" in result.output
    assert "create the directory, or choose another one" in result.output
    assert not (tmp_path / "not-there").exists()


@pytest.mark.parametrize("option", ["--only", "--skip"])
@pytest.mark.parametrize("pattern", ["C-999", "all", "C-101..", "C-130..C-120"])
def test_unknown_case_ends_the_run(tmp_path: Path, option: str, pattern: str) -> None:
    arguments = ["conformance", f"--endpoint={tmp_path}/csi.sock", f"--target-root={tmp_path}"]
    result = CliRunner().invoke(main, [*arguments, "--only=C-001", option, pattern])
    assert result.exit_code == 2
    assert f"no such case: {pattern}" in result.output
    assert "crust conformance --list shows all" in result.output


def test_list_shows_chosen_cases_without_a_driver() -> None:
    arguments = ["conformance", "--list", "--only=c-101..C-103,114", "--skip=102"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0
    numbers = [line.split()[:2] for line in result.output.splitlines()]
    assert numbers == [["C-101", "MUST"], ["C-103", "MUST"], ["C-114", "MUST"]]


def test_endpoint_is_required_for_a_run() -> None:
    result = CliRunner().invoke(main, ["conformance", "--target-root=/"])
    assert result.exit_code == 2
    assert "--endpoint unix:///" in result.output


def test_failed_case_is_shown_with_clause_request_and_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = MemoryDriver("1.13")

    def twist(method: str, _request: Any, answer: Any) -> Any:
        wrong = method == "DeleteVolume" and isinstance(answer, Refused)
        return Refused(Code.INTERNAL, "a bug") if wrong else answer

    driver.twist = twist
    given = _given(tmp_path, "C-001", "C-112", "C-601")
    with serving(driver, _socket(tmp_path)):
        outcome = suite.run_suite(given, MemoryHost(driver))
    printed = capsys.readouterr().out
    assert outcome.exit_code == 1
    lines = [" ".join(each.split()) for each in printed.splitlines()]
    rules = {number: case.rule for number, case in catalogue.cases("C").items()}
    assert lines[:6] == [
        f"C-001 passed {rules['C-001']}",
        f"C-112 failed {rules['C-112']}",
        "clause MUST · DeleteVolume: idempotent: a volume that does not exist MUST be OK; volume_id is REQUIRED",
        "sent DeleteVolumeRequest {}",
        "got INTERNAL: a bug",
        "but DeleteVolumeRequest was answered INTERNAL, must be INVALID_ARGUMENT",
    ]
    assert "1 option.log: C-601" in printed
    assert "1 passed, 1 failed, 0 warning, 0 note, 1 skipped" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(("strict", "code"), [(False, 0), (True, 1)])
def test_note_and_warning_fail_strict_runs_only(tmp_path: Path, *, strict: bool, code: int) -> None:
    driver = MemoryDriver("1.13", {"lock-beside-socket"})
    given = replace(_given(tmp_path, "C-006", "C-010"), profile="1.12", strict=strict)
    with serving(driver, _socket(tmp_path)):
        outcome = suite.run_suite(given, MemoryHost(driver), quiet=True)
    assert outcome.exit_code == code
    assert outcome.numbers("warning") == {"C-010"}
    assert outcome.numbers("note") == {"C-006"}


def test_settings_of_pytest_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --collect-only\n")
    (tmp_path / "conftest.py").write_text("raise RuntimeError\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--collect-only -k nothing")
    monkeypatch.setenv("PYTEST_PLUGINS", "no_such_plugin")
    driver = MemoryDriver("1.13")
    with serving(driver, _socket(tmp_path)):
        outcome = suite.run_suite(_given(tmp_path, "C-001"), MemoryHost(driver), quiet=True)
    assert outcome.numbers("passed") == {"C-001"}
    assert os.environ["PYTEST_ADDOPTS"] == "--collect-only -k nothing"


def test_request_is_shown_without_its_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = MemoryDriver("1.13")
    driver.twist = lambda method, request, answer: (
        Refused(Code.INTERNAL, f"bad: {request.secrets['token']}")
        if method == "CreateVolume"
        else answer
    )
    given = replace(
        _given(tmp_path, "C-102"), parameters=Parameters(secrets={"token": "planted-secret"})
    )
    with serving(driver, _socket(tmp_path)):
        suite.run_suite(given, MemoryHost(driver))
    printed = capsys.readouterr().out
    assert "CreateVolumeRequest" in printed
    assert "planted-secret" not in printed


def test_case_without_capability_is_skipped_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = MemoryDriver("1.13")
    driver.identity.controller.remove(1)
    with serving(driver, _socket(tmp_path)):
        outcome = suite.run_suite(_given(tmp_path, "C-101..C-103", "C-001"), MemoryHost(driver))
    assert outcome.skipped == dict.fromkeys(("C-101", "C-102", "C-103"), CREATE)
    assert outcome.numbers("passed") == {"C-001"}
    assert f"3 {CREATE}: C-101..C-103" in capsys.readouterr().out


def test_reports_have_every_case_with_its_outcome(tmp_path: Path) -> None:
    driver = MemoryDriver("1.13", {"lock-beside-socket", "never-idempotent"})
    junit, found = tmp_path / "report.xml", tmp_path / "report.json"
    asked = ("C-001", "C-010", "C-103", "C-601")
    given = replace(_given(tmp_path, *asked), junit=junit, json=found)
    with serving(driver, _socket(tmp_path)):
        suite.run_suite(given, MemoryHost(driver), quiet=True)
    cases = {each["number"]: each for each in json.loads(found.read_text())["cases"]}
    outcomes = {number: each["outcome"] for number, each in cases.items()}
    expected = {"C-001": "passed", "C-010": "warning", "C-103": "failed", "C-601": "skipped"}
    assert outcomes == expected
    assert cases["C-103"]["findings"][0]["sent"].startswith("CreateVolumeRequest {")
    suites = ElementTree.parse(junit).getroot()
    counts = suites[0].attrib
    assert (counts["tests"], counts["failures"], counts["skipped"]) == ("4", "1", "1")
    kinds = {each.get("name", "")[:5]: {kind.tag for kind in each} for each in suites[0]}
    assert {number: tags - {"properties"} for number, tags in kinds.items()} == {
        "C-001": set(), "C-010": {"system-out"}, "C-103": {"failure"}, "C-601": {"skipped"},
    }  # fmt: skip


def test_driver_that_crashes_ends_the_run_with_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = MemoryDriver("1.13")
    socket = tmp_path / "plugin" / "csi.sock"
    socket.parent.mkdir()
    given = Options(
        socket=str(socket),
        target_root=tmp_path,
        only=("C-001", "C-102", "C-103"),
        junit=tmp_path / "report.xml",
        timeout_s=3.0,
    )
    with ExitStack() as served:
        served.enter_context(serving(driver, socket))
        death = threading.Thread(target=served.close)

        def twist(method: str, _request: Any, answer: Any) -> Any:
            if method != "CreateVolume":
                return answer
            death.start()
            return Refused(Code.INTERNAL, "dying")

        driver.twist = twist
        outcome = suite.run_suite(given, MemoryHost(driver))
        death.join()
    assert outcome.exit_code == 3
    assert outcome.numbers("passed") == {"C-001"}
    assert outcome.numbers("failed") == {"C-102"}
    assert any("not removed (name volume-" in each.why for each in outcome.each[1].findings)
    printed = capsys.readouterr().out
    assert "does not answer: " in printed
    assert "C-102 failed" in printed
    assert 'value="C-102"' in (tmp_path / "report.xml").read_text()


def test_terminated_run_removes_what_its_case_created(tmp_path: Path) -> None:
    driver = MemoryDriver("1.13")
    (tmp_path / "plugin").mkdir()
    made: list[int] = []

    def twist(method: str, _request: Any, answer: Any) -> Any:
        if method == "ValidateVolumeCapabilities":
            made.append(len(driver.state.volumes))
            os.kill(os.getpid(), signal.SIGTERM)
        return answer

    driver.twist = twist
    arguments = ["conformance", f"--endpoint={tmp_path}/plugin/csi.sock"]
    arguments += [f"--target-root={tmp_path}", "--only=C-122", "--only=C-123"]
    with serving(driver, tmp_path / "plugin" / "csi.sock"):
        result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert (made, driver.state.volumes) == ([1], {})


def _socket(directory: Path) -> Path:
    socket = directory / "plugin" / "csi.sock"
    socket.parent.mkdir()
    return socket


def _given(directory: Path, *only: str) -> Options:
    socket = directory / "plugin" / "csi.sock"
    return Options(socket=str(socket), target_root=directory, only=only, timeout_s=3.0)


@pytest.mark.parametrize(
    "words",
    [["--endpoint", "unix:///a/csi.sock", "--target-root", "/"], ["--runtime", "box"]],
)
def test_conformance_that_cannot_run_here_is_no_broken_must(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert CliRunner().invoke(main, ["conformance", *words]).exit_code == 2


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

    monkeypatch.setattr(suite_of_runtimes, "run_suite", record)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert run("mine", "--only", "R-101", "--timeout-s", "7", "--strict").exit_code == 0
    assert asked.pop() == ("mine", RunOptions(only=("R-101",), timeout_s=7.0, strict=True))
    assert run("mine").exit_code == 0
    assert asked.pop() == ("mine", RunOptions(timeout_s=options.RUNTIME_TIMEOUT_S))


def test_case_for_runtimes_is_no_case_for_drivers() -> None:
    ran = CliRunner().invoke(main, ["conformance", "--list", "--only", "R-101"])
    assert ran.exit_code == 2
    assert "begin with C" in ran.output


def test_restart_command_may_leave_its_output_open(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    try:
        run_restart_command(f"sleep 600 & echo $! > {pid}", 60.0)
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_failed_restart_command_is_reported_with_its_output() -> None:
    with pytest.raises(AssertionError, match="ended with 3: no such driver"):
        run_restart_command("echo no such driver >&2; exit 3", 60.0)


def test_hanging_restart_command_is_reported() -> None:
    with pytest.raises(AssertionError, match=r"did not return within 0\.2 s: it printed nothing"):
        run_restart_command("exec sleep 600", 0.2)
