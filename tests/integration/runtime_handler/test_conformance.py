"""`crust conformance --runtime` against the example of docs/runtime-author.md, as it is and with faults."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from crust.cli.main import main
from crust.host.process import capabilities
from crust.runtime_handler.conformance import suite
from crust.runtime_handler.conformance.case import CASES
from crust.runtime_handler.conformance.subject import RuntimeNotUsable
from tests.support.pages.page_programs import program

PAGE = "runtime-author.md"
"""The program is run from the page's text."""
PLACES = "{registry} {directory}/box.sock {directory}/targets"
pytestmark = pytest.mark.root


def _command(file: Path) -> str:
    return f"{sys.executable} {file} {PLACES}"


def _failed(lines: list[str]) -> set[str]:
    return {line.split()[0] for line in lines if line.split()[1] == "failed" and line[0] == "R"}


@pytest.mark.timeout(300)
def test_example_runtime_breaks_no_duty(tmp_path: Path) -> None:
    example = tmp_path / "box.py"
    example.write_text(program(PAGE))
    ran = CliRunner().invoke(main, ["conformance", "--runtime", _command(example)])
    lines = ran.output.splitlines()
    # a mounted ext4 grows only with this capability: without it H-48 cannot be kept, and the volume is refused
    cannot_grow = set() if capabilities.has_cap_sys_resource() else {"R-304"}
    assert _failed(lines) == cannot_grow, ran.output
    assert ran.exit_code == (1 if cannot_grow else 0)
    assert len([line for line in lines if line.startswith("R-")]) == len(CASES)


FAULTS = {
    "features=FEATURES": ("features=frozenset(Feature)", {"R-213", "R-214", "R-215", "R-219"}),
    "claim.hand_over()": ("pass", {"R-105"}),
    "pass_fds=claim.fds, ": ("", {"R-106"}),
    "await asyncio.to_thread(claim.release)": ("pass", {"R-104"}),
    "found.require_whole().target": ("volumes.TargetPath.parse(source)", {"R-211"}),
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


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("right", FAULTS)
def test_fault_of_runtime_is_reported_with_its_clause(tmp_path: Path, right: str) -> None:
    wrong, numbers = FAULTS[right]
    text = program(PAGE)
    assert right in text
    faulty = tmp_path / "faulty.py"
    faulty.write_text(text.replace(right, wrong))
    lines: list[str] = []
    broken = suite.run(_command(faulty), lines.append, only=numbers, timeout_s=60)
    assert _failed(lines) == numbers, "\n".join(lines)
    assert broken == len(numbers)
    assert any(line.startswith("    -> start") for line in lines)


@pytest.mark.timeout(120)
def test_runtime_that_dies_at_its_restart_is_started_again_for_the_next_case(
    tmp_path: Path,
) -> None:
    """It does not remove its socket, and R-106 kills it."""
    text = program(PAGE)
    starts = "    asyncio.run(main(*sys.argv[1:4]))\n"
    assert starts in text
    fragile = tmp_path / "fragile.py"
    refuses = "    assert not __import__('os').path.exists(sys.argv[2])\n"
    fragile.write_text(text.replace(starts, refuses + starts))
    lines: list[str] = []
    suite.run(_command(fragile), lines.append, only={"R-101", "R-106", "R-107"}, timeout_s=60)
    verdicts = {line.split()[0]: line.split()[1] for line in lines if line.startswith("R-")}
    assert verdicts == {"R-101": "passed", "R-106": "failed", "R-107": "passed"}, "\n".join(lines)


def test_command_that_does_not_register_is_one_sentence() -> None:
    with pytest.raises(RuntimeNotUsable, match="did not register"):
        suite.run("sleep 30", lambda _: None, timeout_s=0.5)
