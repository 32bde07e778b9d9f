"""`crust conformance`: flags, parameters file, and a driver that does not answer."""

import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from crust import errors
from crust.cli.main import main
from crust.conformance import options, suite
from crust.conformance.case import CREATE
from crust.conformance.options import Options
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
    with pytest.raises(options.InvalidParametersFile, match="cannot be used"):
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


@pytest.mark.parametrize("place", ["{tmp}/file", "/proc/sys"])
def test_unwritable_report_is_refused_before_a_case_runs(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    report = f"{place.format(tmp=tmp_path)}/report.xml"
    arguments = ["conformance", f"--endpoint={tmp_path}/csi.sock", f"--target-root={tmp_path}"]
    result = CliRunner().invoke(main, [*arguments, f"--junit={report}"])
    assert result.exit_code == 2
    assert f"the report {report} cannot be written" in result.output


@pytest.mark.parametrize("only", [("C-999",), ("C-001", "c-101")])
def test_unknown_case_is_reported_and_none_is_run(
    tmp_path: Path, only: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    driver = MemoryDriver("1.13")
    socket = tmp_path / "csi.sock"
    given = Options(socket=str(socket), target_root=tmp_path, only=only, timeout_s=3.0)
    with serving(driver, socket):
        outcome = suite.run(given, MemoryHost(driver))
    assert (outcome.exit_code, outcome.passed) == (2, frozenset())
    assert f"no such case: {only[-1]}" in capsys.readouterr().err


def test_report_has_number_of_case_and_rule_of_failed_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = MemoryDriver("1.13")
    socket = tmp_path / "plugin" / "csi.sock"
    socket.parent.mkdir()
    given = Options(
        socket=str(socket),
        target_root=tmp_path,
        profile="1.12",
        only=("C-001", "C-006", "C-601"),
        timeout_s=3.0,
    )
    with serving(driver, socket):
        outcome = suite.run(given, MemoryHost(driver))
    printed = capsys.readouterr().out
    assert outcome.exit_code == 1
    assert printed.startswith("C-001 passed\nC-006 failed\nC-601 skipped\n")
    assert "CSI 1.12 does not have what the controller and the node advertise: ({16, 17}" in printed
    *_, heading, rule, _ = printed.splitlines()
    assert "failed" in heading
    assert rule.startswith("C-006 Under CSI 1.13 nothing of the volume condition")
    assert printed.count(rule) == 2, "the heading of the failure is the rule, too"
    assert str(suite.CASES) not in "".join(printed.splitlines()[:3])


def test_case_without_capability_is_skipped_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = MemoryDriver("1.13")
    driver.identity.controller.remove(1)
    given = Options(
        socket=f"{tmp_path}/csi.sock", target_root=tmp_path, only=("C-101", "C-001"), timeout_s=3.0
    )
    with serving(driver, tmp_path / "csi.sock"):
        outcome = suite.run(given, MemoryHost(driver))
    assert outcome.skipped == {"C-101": CREATE}
    assert outcome.passed == {"C-001"}
    assert f"C-101 needs {CREATE}" in capsys.readouterr().out


def test_the_report_names_the_cases_by_number(tmp_path: Path) -> None:
    driver = MemoryDriver("1.13")
    given = Options(
        socket=f"{tmp_path}/csi.sock",
        target_root=tmp_path,
        only=("C-001",),
        junit=tmp_path / "report.xml",
        timeout_s=3.0,
    )
    with serving(driver, tmp_path / "csi.sock"):
        suite.run(given, MemoryHost(driver), quiet=True)
    assert '<property name="case" value="C-001"' in (tmp_path / "report.xml").read_text()


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
        outcome = suite.run(given, MemoryHost(driver))
        death.join()
    assert outcome.exit_code == 3
    assert outcome.passed == {"C-001"}
    assert outcome.failed == {"C-102"}
    printed = capsys.readouterr().out
    assert "does not answer any more" in printed
    assert "C-102 CreateVolume" in printed.splitlines()[-3]
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
