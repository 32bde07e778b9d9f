"""Every case of the conformance suite fails for a driver that breaks its rule, and for no correct one."""

import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from crust_conformance import catalogue, suite
from crust_conformance.catalogue import Strength
from crust_conformance.options import MIB, Options, Parameters, Profile
from crust_conformance.results import OUTCOMES, Results
from crust_conformance.runtimes import suite as runtimes
from tests.support.drivers.fake_driver import Code, Failure, FakeDriver
from tests.support.memory_csi.host import MemoryHost, serving
from tests.support.memory_csi.permissive import AcceptingDriver, PermissiveDriver, SharedHost
from tests.support.mutants import controller_mutants, node_mutants
from tests.support.mutants.mutant import Mutant

ALL = (*controller_mutants.ALL, *node_mutants.ALL)
ROWS = Path(catalogue.__file__).with_name("cases.md")
CASES = catalogue.cases("C")

GIVEN = Parameters(
    fs_types=("ext4",),
    block=True,
    size_bytes=16 * MIB,
    mutable_parameters={"iops": "5"},
    ephemeral_context={"size": "1"},
    multi_node=True,
    other_node_id="node-2",
)

# Cases of the other profile, and of drivers that expand volumes only offline.
SKIPPED = {
    "1.12": {"C-145", "C-146", "C-158", "C-176", "C-261", "C-262"},
    "1.13": {"C-138", "C-139", "C-176", "C-244"},
}


@pytest.mark.parametrize("profile", ["1.12", "1.13"])
def test_a_correct_driver_passes_every_case(tmp_path: Path, profile: Profile) -> None:
    outcome = run(FakeDriver(profile), tmp_path, profile, timeout_s=20.0)
    assert outcome.numbers("failed", "warning", "note") == frozenset()
    assert outcome.exit_code == 0
    assert set(outcome.skipped) == SKIPPED[profile]


def test_a_correct_driver_that_expands_offline_passes_that_case(tmp_path: Path) -> None:
    outcome = run(FakeDriver("1.13", offline=True), tmp_path, "1.13", "C-176", timeout_s=20.0)
    assert outcome.numbers("passed") == {"C-176"}, outcome.numbers("failed")


def test_driver_without_raw_copies_and_change_tracking_passes(tmp_path: Path) -> None:
    """CSI leaves both open; the driver answers FAILED_PRECONDITION, and the cases check what they still can."""
    driver = FakeDriver("1.13")

    def twist(method: str, request: Any, answer: Any) -> Any:
        source = {
            "CreateSnapshot": lambda: request.source_volume_id,
            "CreateVolume": lambda: request.volume_content_source.volume.volume_id,
        }.get(method, str)()
        used = [target for target in driver.state.targets.values() if target.is_block]
        raw = {target.volume.wire.volume_id for target in used}
        if source in raw or method == "GetMetadataDelta":
            return Failure(Code.FAILED_PRECONDITION, "not now")
        return answer

    driver.twist = twist
    asked = ("C-306", "C-315", "C-361", "C-362", "C-363", "C-365")
    outcome = run(driver, tmp_path, "1.13", *asked, timeout_s=20.0)
    assert outcome.numbers("failed") == frozenset()
    assert outcome.numbers("passed") == {"C-306", "C-315", "C-361", "C-363"}
    assert set(outcome.skipped) == {"C-362", "C-365"}
    assert "not now" in outcome.skipped["C-362"]


CODE = re.compile(
    r"\bassert\b|crust_conformance|\bwhere \w+ =|<\w+\.\w+|object at|^(the answer is )?[A-Z_]+: "
)
"""What a report must not have: the suite's own assertion, its modules, Python's objects, and a code that is bare."""


def reasons(outcome: Results) -> list[str]:
    return [finding.why for result in outcome.cases for finding in result.findings]


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: f"{mutant.case}-{mutant.name}")
def test_case_fails_for_broken_driver(mutant: Mutant, tmp_path: Path) -> None:
    driver = FakeDriver(mutant.profile, set(mutant.faults), mutant.twist(), offline=mutant.offline)
    outcome = run(driver, tmp_path, mutant.profile, mutant.case)
    strength = mutant.strength or CASES[mutant.case].strength
    assert outcome.numbers(OUTCOMES[strength]) == {mutant.case}, outcome
    assert not driver.state.targets
    assert [why for why in reasons(outcome) if CODE.search(why)] == []


def test_own_clause_of_every_case_has_a_broken_driver() -> None:
    assert set(CASES) == {mutant.case for mutant in ALL if mutant.strength is None}


def test_every_case_quotes_its_clauses_each_of_another_strength() -> None:
    for case in CASES.values():
        strengths = [clause.strength for clause in case.clauses]
        assert strengths, case.number
        assert sorted(set(strengths), key=list(Strength).index) == strengths, case.number


@pytest.mark.parametrize(("kind", "directory"), [("C", suite.CASES), ("R", runtimes.CASES)])
def test_each_case_has_one_row_and_one_function(kind: str, directory: Path) -> None:
    rows = re.findall(rf"^\| ({kind}-\d+) \|", ROWS.read_text(), re.MULTILINE)
    texts = [file.read_text() for file in directory.rglob("*_cases.py")]
    names = [
        name for text in texts for name in re.findall(r"^(?:async )?def (test_\w+)", text, re.M)
    ]
    assert sorted(rows) == sorted(map(catalogue.number_of, names))
    assert len(rows) == len(set(rows))


def run(
    driver: FakeDriver, directory: Path, profile: Profile, *only: str, timeout_s: float = 3.0
) -> Results:
    """The suite against a driver of ours; `timeout_s` is what a busy machine may need, or a mutant waits for."""
    driver.log = directory / "log"
    driver.log.touch()
    socket = directory / "plugin" / "csi.sock"
    socket.parent.mkdir()
    with (
        serving(driver, socket),
        restarting(driver, directory) as command,
        # C-224 needs paths of 128 bytes
        tempfile.TemporaryDirectory(prefix="ct-") as root,
    ):
        options = Options(
            socket=str(socket),
            target_root=Path(root),
            profile=profile,
            parameters=GIVEN,
            log=driver.log,
            restart_command=command,
            only=only,
            strict=True,
            timeout_s=timeout_s,
        )
        return suite.run_suite(options, MemoryHost(driver), quiet=True)


@contextmanager
def restarting(driver: FakeDriver, directory: Path) -> Iterator[str]:
    """A command that makes the driver crash and come back, and returns when it has."""
    asked, done = directory / "asked", directory / "done"
    for fifo in (asked, done):
        os.mkfifo(fifo)

    def serve() -> None:
        while asked.read_text() == "crash\n":
            driver.crash()
            done.write_text("done\n")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"echo crash > {asked}; cat {done} > /dev/null"
    finally:
        asked.write_text("stop\n")
        thread.join()


# Drivers that conform in an unusual way: one that uses every freedom of CSI, and one of two plugins.


def test_permissive_driver_passes_with_warnings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = PermissiveDriver()
    socket = tmp_path / "plugin" / "csi.sock"
    socket.parent.mkdir()
    small = Parameters(size_bytes=MIB)
    given = Options(socket=str(socket), target_root=tmp_path, parameters=small, timeout_s=20.0)
    with serving(driver, socket):
        outcome = suite.run_suite(given, SharedHost(driver))
    assert not outcome.numbers("failed"), capsys.readouterr().out
    assert outcome.exit_code == 0
    assert not driver.state.volumes
    assert not driver.state.targets
    assert not driver.state.snapshots
    assert {"C-005", "C-010", "C-114", "C-216"} <= outcome.numbers("warning")
    assert {"C-105", "C-109", "C-123", "C-134"} <= outcome.numbers("note")
    assert {"C-112", "C-202", "C-213", "C-221", "C-252", "C-305"} <= outcome.numbers("passed")
    assert outcome.skipped["C-214"] == "driver.block"
    assert outcome.skipped["C-206"] == "driver.checks-fs-type"
    assert "C-244" in outcome.numbers("passed"), "that it speaks CSI 1.12 is seen"


class StuckDriver(AcceptingDriver):
    """Deletes no volume."""

    def find(self, method: str) -> Any:
        if method == "DeleteVolume":
            raise Failure(Code.INTERNAL, "the disk is stuck")
        return super().find(method)


def run_accepting(driver: AcceptingDriver, directory: Path, root: Path) -> Results:
    """The cases in which a driver has to refuse what creates, stages, attaches or publishes."""
    driver.log = directory / "log"
    driver.log.touch()
    socket = directory / "csi.sock"
    given = Options(
        socket=str(socket),
        target_root=root,
        profile="1.13",
        parameters=Parameters(size_bytes=MIB, fs_types=("ext4",), block=True),
        log=driver.log,
        only=("22", "23", "110", "153", "314", "315", "601", "602"),
        timeout_s=20.0,
    )
    with serving(driver, socket):
        return suite.run_suite(given, MemoryHost(driver), quiet=True)


def test_accepted_refusals_leave_nothing_on_the_driver(tmp_path: Path) -> None:
    driver = AcceptingDriver("1.13")
    with tempfile.TemporaryDirectory(prefix="ct-", dir="/tmp") as root:
        outcome = run_accepting(driver, tmp_path, Path(root))
        assert os.listdir(root) == []
    state = driver.state
    assert (state.volumes, state.snapshots, state.groups, state.targets) == ({}, {}, {}, {})
    assert outcome.numbers("note") >= {"C-022", "C-023", "C-110"}
    assert "C-601" in outcome.numbers("passed"), "its undo is of the target that it published"
    assert outcome.numbers("failed") == {"C-153"}
    assert not [why for why in reasons(outcome) if "not removed" in why]


def test_volume_that_the_driver_does_not_delete_is_named(tmp_path: Path) -> None:
    driver = StuckDriver("1.13")
    with tempfile.TemporaryDirectory(prefix="ct-", dir="/tmp") as root:
        outcome = run_accepting(driver, tmp_path, Path(root))
    text = "\n".join(reasons(outcome))
    left = [f"not removed (volume_id {volume_id})" for volume_id in driver.state.volumes]
    assert left
    assert [why for why in left if why not in text] == []
