"""`crust-conformance --runtime` against the example of docs/runtime-author.md, as it is and with faults."""

import ast
import base64
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from crust.host.mounts import growth
from crust_conformance import catalogue
from crust_conformance.command import main
from crust_conformance.options import RunOptions
from crust_conformance.runtimes import suite
from examples import second_runtime
from tests.support.pages.page_programs import program
from tests.support.runtimes import kept_boxes

PAGE = "runtime-author.md"
"""The program is run from the page's text."""
PLACES = "{registry} {directory}/box.sock {directory}/targets"
pytestmark = pytest.mark.root


def _command(file: Path) -> str:
    return f"{sys.executable} {file} {PLACES}"


def test_example_runtime_breaks_no_duty(tmp_path: Path) -> None:
    example = tmp_path / "box.py"
    example.write_text(program(PAGE))
    report = tmp_path / "report.xml"
    flags = ["--runtime", _command(example), "--junit", str(report)]
    ran = CliRunner().invoke(main, [*flags])
    # a mounted ext4 grows only with this capability: without it H-48 cannot be kept, and the volume is refused
    cannot_grow = set() if growth.has_cap_sys_resource() else {"R-304"}
    failed = {line.split()[0] for line in ran.output.splitlines() if line[6:12] == "failed"}
    assert failed == cannot_grow, ran.output
    assert ran.exit_code == (1 if cannot_grow else 0)
    numbers = [case.get("name", "")[:5] for case in ElementTree.parse(report).iter("testcase")]
    assert numbers == sorted(catalogue.cases("R"))


FAULTS = {
    "features=FEATURES": (
        "features=frozenset(HandlerFeature)",
        {"R-213", "R-214", "R-215", "R-219"},
    ),
    "await claim.hand_over(vm.pid)": ("pass", {"R-105"}),
    "pass_fds=claim.fds, ": ("", {"R-106"}),
    "await claim.release()": ("pass", {"R-104"}),
    "resolved.require_whole().target": ("volumes.TargetPath.parse(source)", {"R-211"}),
    "resolved.require_whole()": ("resolved.record", {"R-220"}),
}


@pytest.fixture
def nothing_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A sandbox that was started without the claim's descriptors is found by nobody: kill it by its environment."""
    monkeypatch.setenv("FAULTY_BOX", str(tmp_path))
    marked = f"FAULTY_BOX={tmp_path}".encode()
    yield
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_ours = marked in (process / "environ").read_bytes().split(b"\0")
            if is_ours and int(process.name) != os.getpid():
                os.kill(int(process.name), signal.SIGKILL)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("right", FAULTS)
def test_fault_of_runtime_is_reported_with_its_clause(
    tmp_path: Path, right: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong, numbers = FAULTS[right]
    text = program(PAGE)
    assert right in text
    faulty = tmp_path / "faulty.py"
    faulty.write_text(text.replace(right, wrong))
    options = RunOptions(only=tuple(numbers), timeout_s=60)
    outcome = suite.run_suite(_command(faulty), options)
    printed = capsys.readouterr().out
    # the SDK refuses to hand over what the machine has not got, and the runtime has no sandbox to stop
    code = 3 if numbers == {"R-106"} else 1
    assert (set(outcome.numbers("failed")), outcome.exit_code) == (numbers, code), printed
    assert "-> start" in printed
    for number in numbers:
        assert f"clause {catalogue.cases('R')[number].clauses[0]}" in printed


KEEPER_CASES = {
    *("R-110", "R-111", "R-112", "R-113"),
    *("R-125", "R-126", "R-127", "R-128"),
}


@pytest.mark.spec("H-43")
@pytest.mark.spec("H-44")
@pytest.mark.spec("H-45")
@pytest.mark.spec("H-46")
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("fault", "broken"),
    [
        ("", set()),
        ("forgets", {"R-113"}),
        ("sleep", {"R-105", "R-110", "R-111", "R-112", "R-113"}),
        ("spares", {"R-125", "R-126"}),
        ("kills", {"R-127", "R-128"}),
        ("once", {"R-127"}),
        ("trusts", {"R-126"}),
    ],
)
def test_keepers_of_a_runtime_are_tried(
    fault: str, broken: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One with the SDK's keepers, without and with a fault; one with two processes in their place."""
    cases = {f"R-{number}" for number in range(101, 130)} if not fault else {"R-101", *broken}
    command = f"{sys.executable} -m {kept_boxes.__name__} {PLACES} {fault}"
    options = RunOptions(only=tuple(cases), timeout_s=20 if fault else 60)
    outcome = suite.run_suite(command, options)
    printed = capsys.readouterr().out
    assert set(outcome.numbers("failed")) == broken, printed
    assert set(outcome.numbers("passed")) == cases - broken, printed


def test_runtime_that_dies_at_its_restart_is_started_again(tmp_path: Path) -> None:
    """It does not remove its socket, and R-106 kills it."""
    text = program(PAGE)
    starts = "    asyncio.run(main(*sys.argv[1:4]))\n"
    assert starts in text
    fragile = tmp_path / "fragile.py"
    refuses = "    assert not __import__('os').path.exists(sys.argv[2])\n"
    fragile.write_text(text.replace(starts, refuses + starts))
    options = RunOptions(only=("R-101", "R-106", "R-107"), timeout_s=60)
    outcome = suite.run_suite(_command(fragile), options)
    assert sorted(outcome.numbers("passed")) == ["R-101", "R-107"]
    assert sorted(outcome.numbers("failed")) == ["R-106"]


def test_shell_in_front_of_the_runtime_is_named(
    tmp_path: Path, nothing_left: None, capsys: pytest.CaptureFixture[str]
) -> None:
    example = tmp_path / "box.py"
    example.write_text(program(PAGE))
    shell = f"sh -c '{_command(example)}; true'"
    options = RunOptions(only=("R-106",), timeout_s=5)
    assert suite.run_suite(shell, options).numbers("failed") == {"R-106"}
    assert "without a shell" in capsys.readouterr().out


def test_command_that_does_not_register_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = suite.run_suite("sleep 30", RunOptions(timeout_s=0.5))
    assert (outcome.exit_code, outcome.cases) == (3, [])
    printed = capsys.readouterr().err
    assert "did not register" in printed
    assert "{registry}" not in printed, "the author is told of a socket, and not of a placeholder"


CHECKOUT = Path(__file__).parents[3]
VECTORS = CHECKOUT / "specs" / "vectors"
NEED_A_FEATURE = {
    *("R-212", "R-221", "R-222", "R-223", "R-224"),
    *("R-302", "R-303", "R-304", "R-305", "R-306", "R-308", "R-309", "R-310"),
}
"""R-212 is for runtimes without READ_ONLY, the others for those with the feature of the case."""


def _all(name: str) -> list[dict[str, Any]]:
    vectors: list[dict[str, Any]] = json.loads((VECTORS / name).read_text())
    assert vectors
    return vectors


def test_second_runtime_imports_nothing_of_crust() -> None:
    tree = ast.parse(Path(second_runtime.__file__).read_text())
    names = {
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        )
    }  # fmt: skip
    assert {name.partition(".")[0] for name in names} <= {"grpc", *sys.stdlib_module_names}


@pytest.mark.parametrize("vector", _all("records.json"), ids=lambda vector: vector["name"])
def test_second_runtime_agrees_with_the_vectors(vector: dict[str, Any]) -> None:
    data = base64.b64decode(vector.get("base64", "")) or vector["text"].encode()
    if not vector["accepted"]:
        with pytest.raises(second_runtime.Refused):
            second_runtime.parse(data, vector["entry"])
        return
    record = second_runtime.parse(data, vector["entry"])
    assert record["crust"]["handler"] == vector["value"]["handler"]
    assert record["crust"].get("identity") == vector["value"].get("identity")


def test_second_runtime_computes_digests_and_identities_of_the_vectors() -> None:
    for vector in _all("digests.json"):
        assert second_runtime.digest(vector["target_path"]) == vector["digest"]
    for vector in _all("identities.json"):
        assert second_runtime.identity(vector["st_rdev"], vector["diskseq"]) == vector["identity"]


@pytest.mark.root
def test_second_runtime_breaks_no_duty(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    program = f"{sys.executable} {second_runtime.__file__}"
    command = f"{program} {{registry}} {{directory}}/second.sock {{directory}}/targets"
    ran = CliRunner().invoke(main, ["--runtime", command, "--json", str(report)])
    outcomes = {case["number"]: case["outcome"] for case in json.loads(report.read_text())["cases"]}
    assert outcomes == {
        number: "skipped" if number in NEED_A_FEATURE | KEEPER_CASES else "passed"
        for number in catalogue.cases("R")
    }, ran.output
    assert ran.exit_code == 0
