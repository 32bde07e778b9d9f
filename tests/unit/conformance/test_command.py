"""`crust-conformance` for drivers and runtimes: flags, parameters, restart command, a driver without an answer."""

import errno
import json
import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from crust_conformance import catalogue, options, suite
from crust_conformance.cases.disturbed_cases import run_restart_command
from crust_conformance.command import main
from crust_conformance.options import Options, Parameters, RunOptions
from crust_conformance.orchestrator.capabilities import CREATE
from crust_conformance.results import Results
from crust_conformance.runtimes import suite as suite_of_runtimes
from tests.support.drivers.fake_driver import Code, Failure, FakeDriver
from tests.support.faults import lies
from tests.support.memory_csi.host import MemoryHost, serving


def command(*flags: object) -> Result:
    return CliRunner().invoke(main, [*map(str, flags)])


def of_driver(directory: Path, *flags: object) -> Result:
    """The command for a driver, which is away."""
    return command(f"--endpoint=unix://{directory}/csi.sock", f"--target-root={directory}", *flags)


def run(
    driver: FakeDriver, directory: Path, *only: str, served: ExitStack | None = None, **options: Any
) -> Results:
    """The cases against a driver, as the command runs them; the end of `served` is that of the driver."""
    socket = directory / "plugin" / "csi.sock"
    socket.parent.mkdir()
    given = Options(socket=str(socket), target_root=directory, only=only, timeout_s=3.0, **options)
    with served or ExitStack() as stack:
        stack.enter_context(serving(driver, socket))
        return suite.run_suite(given, MemoryHost(driver))


def test_missing_driver_is_reported(tmp_path: Path) -> None:
    result = of_driver(tmp_path, "--timeout-s=0.2")
    assert result.exit_code == 3
    assert f"no driver at {tmp_path}/csi.sock (No such file or directory)" in result.output
    assert f"the driver at {tmp_path}/csi.sock does not answer" in result.output


def test_cases_that_cannot_be_listed_are_not_left_out(tmp_path: Path) -> None:
    hidden = lies.Concerns(frozenset({str(suite.CASES / "node")}), ())
    with (
        lies.failing(hidden, lies.Failure(0, errno.EACCES)),
        pytest.raises(PermissionError),
    ):
        run(FakeDriver("1.13"), tmp_path, "C-101", "C-221")


@pytest.mark.parametrize("place", ["{tmp}/file", "{tmp}/not-there", "/proc/sys"])
@pytest.mark.parametrize("option", ["--junit", "--json"])
def test_unwritable_report_is_refused_at_once(tmp_path: Path, place: str, option: str) -> None:
    (tmp_path / "file").touch()
    report = f"{place.format(tmp=tmp_path)}/report"
    result = of_driver(tmp_path, f"{option}={report}")
    assert result.exit_code == 2
    assert f"the report {report} cannot be written" in result.output
    assert "create the directory, or choose another one" in result.output
    assert not (tmp_path / "not-there").exists()


@pytest.mark.parametrize("option", ["--only", "--skip"])
@pytest.mark.parametrize("pattern", ["C-999", "all", "C-101..", "C-130..C-120"])
def test_unknown_case_ends_the_run(tmp_path: Path, option: str, pattern: str) -> None:
    result = of_driver(tmp_path, "--only=C-001", option, pattern)
    assert result.exit_code == 2
    assert f"no such case: {pattern}" in result.output
    assert "crust-conformance --list shows all" in result.output


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--target-root=/",), "--endpoint unix:///"),
        (("--endpoint=tcp://a", "--target-root=/"), "give unix:///path/of/csi.sock"),
        (("--list", "--only", "R-101"), "begin with C"),
        (("--runtime", "x", "--endpoint", "/s"), "--endpoint: not with --runtime"),
        (("--runtime", "x", "--profile", "1.12", "--log", "/dev/null"), "--log, --profile: not"),
        (("--runtime", "--only", "C-101", "--list"), "begin with R"),
        (("--runtime", "--only", "R-999", "--list"), "no case has such a number"),
        (("--runtime", "--only", "R-101"), "--runtime needs the command"),
        (("--focus=no such words", "--list"), "it matches no number and no rule"),
        (("--focus=[", "--list"), "it is no regular expression"),
        (("--csi.stagingdir=/a",), "--csi.stagingdir"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(flags: tuple[str, ...], why: str) -> None:
    ran = command(*flags)
    assert (ran.exit_code, why in ran.output) == (2, True), ran.output


@pytest.mark.parametrize(
    ("flags", "numbers"),
    [
        (("--only=c-101..C-103,114", "--skip=102"), ["C-101", "C-103", "C-114"]),
        (("--runtime", "--only", "R-301..R-303", "--skip", "302"), ["R-301", "R-303"]),
        (("--runtime",), sorted(catalogue.cases("R"))),
        (
            ("--focus=ListVolumes: at|^C-132", "--focus=DeleteVolume: OK"),
            ["C-112", "C-132", "C-133"],
        ),
        (("--ginkgo.focus", "ListVolumes", "--only=C-131..C-133"), ["C-131", "C-132", "C-133"]),
        (("--runtime", "-ginkgo.focus=dead claim", "--skip=R-123"), ["R-107", "R-114", "R-115"]),
    ],
)
def test_list_shows_what_only_and_skip_leave(flags: tuple[str, ...], numbers: list[str]) -> None:
    """Without a driver, and a runtime."""
    ran = command(*flags, "--list")
    assert (ran.exit_code, [line.split()[0] for line in ran.stdout.splitlines()]) == (0, numbers)


def test_failed_case_is_shown_with_clause_request_and_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = FakeDriver("1.13")

    def twist(method: str, _request: Any, answer: Any) -> Any:
        wrong = method == "DeleteVolume" and isinstance(answer, Failure)
        return Failure(Code.INTERNAL, "a bug") if wrong else answer

    driver.twist = twist
    outcome = run(driver, tmp_path, "C-001", "C-112", "C-601")
    printed = capsys.readouterr().out
    assert outcome.exit_code == 1
    lines = [" ".join(splitline.split()) for splitline in printed.splitlines()]
    rules = {number: case.rule for number, case in catalogue.cases("C").items()}
    assert lines[:6] == [
        f"C-001 passed {rules['C-001']}",
        f"C-112 failed {rules['C-112']}",
        "clause MUST · DeleteVolume: idempotent; volume_id is REQUIRED",
        "sent DeleteVolumeRequest {}",
        "got INTERNAL: a bug",
        "but DeleteVolumeRequest was answered INTERNAL, must be INVALID_ARGUMENT",
    ]
    assert "1 option.log: C-601" in printed
    assert "1 passed, 1 failed, 0 warning, 0 note, 1 skipped" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(("strict", "code"), [(False, 0), (True, 1)])
def test_note_and_warning_fail_strict_runs_only(tmp_path: Path, *, strict: bool, code: int) -> None:
    driver = FakeDriver("1.13", {"lock-beside-socket"})
    outcome = run(driver, tmp_path, "C-006", "C-010", profile="1.12", strict=strict)
    assert outcome.exit_code == code
    assert outcome.numbers("warning") == {"C-010"}
    assert outcome.numbers("note") == {"C-006"}


def test_settings_of_pytest_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --collect-only\n")
    (tmp_path / "conftest.py").write_text("raise RuntimeError\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--collect-only -k nothing")
    monkeypatch.setenv("PYTEST_PLUGINS", "no_such_plugin")
    outcome = run(FakeDriver("1.13"), tmp_path, "C-001")
    assert outcome.numbers("passed") == {"C-001"}
    assert os.environ["PYTEST_ADDOPTS"] == "--collect-only -k nothing"


def test_request_is_shown_without_its_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = FakeDriver("1.13")
    driver.twist = lambda method, request, answer: (
        Failure(Code.INTERNAL, f"bad: {request.secrets['token']}")
        if method == "CreateVolume"
        else answer
    )
    secrets = Parameters(secrets={"token": "planted-secret"})
    run(driver, tmp_path, "C-102", parameters=secrets)
    printed = capsys.readouterr().out
    assert "CreateVolumeRequest" in printed
    assert "planted-secret" not in printed


def test_case_without_capability_is_skipped_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = FakeDriver("1.13")
    driver.controller_rpcs.remove(1)
    outcome = run(driver, tmp_path, "C-101..C-103", "C-001")
    assert outcome.skipped == dict.fromkeys(("C-101", "C-102", "C-103"), CREATE)
    assert outcome.numbers("passed") == {"C-001"}
    assert f"3 {CREATE}: C-101..C-103" in capsys.readouterr().out


def test_reports_have_every_case_with_its_outcome(tmp_path: Path) -> None:
    driver = FakeDriver("1.13", {"lock-beside-socket", "never-idempotent"})
    junit, report = tmp_path / "report.xml", tmp_path / "report.json"
    run(driver, tmp_path, "C-001", "C-010", "C-103", "C-601", junit=junit, json=report)
    cases = {case["number"]: case for case in json.loads(report.read_text())["cases"]}
    outcomes = {number: case["outcome"] for number, case in cases.items()}
    expected = {"C-001": "passed", "C-010": "warning", "C-103": "failed", "C-601": "skipped"}
    assert outcomes == expected
    assert cases["C-103"]["findings"][0]["sent"].startswith("CreateVolumeRequest {")
    suites = ElementTree.parse(junit).getroot()
    counts = suites[0].attrib
    assert (counts["tests"], counts["failures"], counts["skipped"]) == ("4", "1", "1")
    kinds = {case.get("name", "")[:5]: {kind.tag for kind in case} for case in suites[0]}
    assert {number: tags - {"properties"} for number, tags in kinds.items()} == {
        "C-001": set(), "C-010": {"system-out"}, "C-103": {"failure"}, "C-601": {"skipped"},
    }  # fmt: skip


def test_driver_that_crashes_ends_the_run_with_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = FakeDriver("1.13")
    with ExitStack() as served:
        death = threading.Thread(target=served.close)

        def twist(method: str, _request: Any, answer: Any) -> Any:
            if method != "CreateVolume":
                return answer
            death.start()
            return Failure(Code.INTERNAL, "dying")

        driver.twist = twist
        report = tmp_path / "report.xml"
        outcome = run(driver, tmp_path, "C-001", "C-102", "C-103", junit=report, served=served)
        death.join()
    assert outcome.exit_code == 3
    assert outcome.numbers("passed") == {"C-001"}
    assert outcome.numbers("failed") == {"C-102"}
    assert any("not removed (name volume-" in finding.why for finding in outcome.cases[1].findings)
    printed = capsys.readouterr().out
    assert "does not answer: " in printed
    assert "C-102 failed" in printed
    assert 'value="C-102"' in (tmp_path / "report.xml").read_text()


def test_terminated_run_removes_what_its_case_created(tmp_path: Path) -> None:
    driver = FakeDriver("1.13")
    made: list[int] = []

    def twist(method: str, _request: Any, answer: Any) -> Any:
        if method == "ValidateVolumeCapabilities":
            made.append(len(driver.state.volumes))
            os.kill(os.getpid(), signal.SIGTERM)
        return answer

    driver.twist = twist
    with serving(driver, tmp_path / "csi.sock"):
        result = of_driver(tmp_path, "--only=C-122", "--only=C-123")
    assert result.exit_code == 2
    assert (made, driver.state.volumes) == ([1], {})


def test_conformance_that_cannot_run_here_is_no_broken_must(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert command("--runtime", "box").exit_code == 2


def test_flags_reach_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, RunOptions]] = []

    def record(command: str, options: RunOptions) -> Results:
        asked.append((command, options))
        return Results()

    monkeypatch.setattr(suite_of_runtimes, "run_suite", record)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    flags = ("--only", "R-101", "--timeout-s", "7", "--strict")
    assert command("--runtime", "mine", *flags).exit_code == 0
    assert asked.pop() == ("mine", RunOptions(only=("R-101",), timeout_s=7.0, strict=True))
    assert command("--runtime", "mine").exit_code == 0
    assert asked.pop() == ("mine", RunOptions(timeout_s=options.RUNTIME_TIMEOUT_S))


def test_flags_of_csi_sanity_reach_the_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Options] = []

    def record(options: Options) -> Results:
        asked.append(options)
        return Results()

    monkeypatch.setattr(suite, "run_suite", record)
    sockets = (f"-csi.endpoint=unix://{tmp_path}/a", "--csi.controllerendpoint", f"{tmp_path}/b")
    reports = (f"--csi.junitfile={tmp_path}/xml", f"-ginkgo.json-report={tmp_path}/json")
    chosen = (f"-csi.mountdir={tmp_path}", "--ginkgo.focus=NodeStage")
    assert command(*sockets, *reports, *chosen).exit_code == 0
    assert asked == [
        Options(
            socket=f"{tmp_path}/a",
            controller_socket=f"{tmp_path}/b",
            target_root=tmp_path,
            junit=tmp_path / "xml",
            json=tmp_path / "json",
            focus=("NodeStage",),
        )
    ]


def test_restart_command_may_leave_its_output_open(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    try:
        run_restart_command(f"sleep 600 & echo $! > {pid}", 60.0)
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("command", "limit_s", "words"),
    [
        ("echo no such driver >&2; exit 3", 60.0, "ended with 3: no such driver"),
        ("exec sleep 600", 0.2, r"did not return within 0\.2 s: it printed nothing"),
    ],
)
def test_restart_command_that_fails_or_hangs_is_reported(
    command: str, limit_s: float, words: str
) -> None:
    with pytest.raises(AssertionError, match=words):
        run_restart_command(command, limit_s)
