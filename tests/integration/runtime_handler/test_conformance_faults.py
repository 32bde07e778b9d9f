"""Each fault of a runtime fails the cases of its clause, and no others: second_runtime.py, changed in one place."""

import sys
from pathlib import Path

import pytest

from crust_conformance.options import RunOptions
from crust_conformance.runtimes import suite
from examples import second_runtime

pytestmark = pytest.mark.root

_REPLACED = """        with open(self.entry / ".claim.json.new", "w", opener=_private) as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(self.entry / ".claim.json.new", self.entry / "claim.json")
"""
_IN_PLACE = """        with open(self.entry / "claim.json", "w", opener=_private) as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
"""
_OWNER_AND_MODE = """    expect(status.st_uid in (0, os.geteuid()), f"{path} is not root's")
    expect(not status.st_mode & 0o022, f"{path} can be written by others")
"""

FAULTS = {
    "a reader beside a writer of the host (H-28)": (
        '        expect(not any(mount.can_write for mount in found), "the host can write to the device")\n',
        "",
        "R-120",
    ),
    "a reader beside a program that holds the device (H-28)": (
        '    raise Refused("the device, or one that shares bytes with it, is mounted or held exclusively")\n',
        "",
        "R-121 R-129",
    ),
    "a reader of a disk whose partition is mounted (H-28)": (
        "        if found:\n            return\n",
        '        if found or any((BLOCK / shown).glob("*/partition")):\n            return\n',
        "R-129",
    ),
    "claim.json is removed without the lock (H-29)": (
        "        if stopped is not None:\n            stopped.kill()\n",
        "        if stopped is not None:\n            stopped.kill()\n"
        '            (stopped.entry / "claim.json").unlink(missing_ok=True)\n',
        "R-124",
    ),
    "a read-only volume is attached writable (H-28)": (
        'flags = ["--read-only"] * is_readonly',
        "flags: list[str] = []",
        "R-122",
    ),
    "the lock's file is not compared (H-22)": (
        "if status is not None and os.path.samestat(os.fstat(self.fd), status):",
        "if True:",
        "R-119",
    ),
    "a dead claim is not looked at (H-23)": ("            lock.check_ended()\n", "", "R-114 R-123"),
    "a dead claim is lost (H-22)": (
        "            os.rename(self.dead, self.claim)\n",
        "            pass\n",
        "R-114 R-115 R-123",
    ),
    "owner and mode are not checked (H-4)": (_OWNER_AND_MODE, "", "R-225"),
    "a second link of claim.lock (H-4)": ("os.fstat(self.fd).st_nlink < 2", "True", "R-226"),
    "options like credentials (H-9)": (
        "return bool(CREDENTIAL_NAME.search(name) or CREDENTIAL.search(option))",
        "return False",
        "R-227",
    ),
    "mount options are dropped (H-8)": (
        '*record["options"], *([] if is_readonly else ["rw"])',
        '"ro" if is_readonly else "rw"',
        "R-228",
    ),
    "a dead claim that cannot be read (H-23)": (
        '            raise Refused(f"the dead claim cannot be read: {error}") from error\n',
        "            return\n",
        "R-123",
    ),
    "a record of any length (H-5)": (
        '    expect(len(data) <= LIMIT_BYTES, f"{path} is too large")\n',
        "",
        "R-229",
    ),
    "an entry without a record (H-11)": (
        'if status_of(entry / "mountInfo.json"):',
        "if True:",
        "R-230",
    ),
    "a record without a source (H-50)": (
        '        expect(has_device is not is_image, "it has no source, or two")\n',
        "",
        "R-229 R-231",
    ),
    "no guard mount (H-38)": (
        'expect(is_guarded or not crust.get("request"),',
        "expect(True,",
        "R-232",
    ),
    "a relative source (H-32)": (
        '    expect(source.startswith("/"), "the mount source is relative")\n',
        "",
        "R-233",
    ),
    "pid is the runtime's (H-24)": (
        "            claim.pid = self.running[box].vm.pid\n",
        "",
        "R-116",
    ),
    "a control character in claim.json (H-24)": (
        '        expect(not CONTROL.search(box), "the sandbox\'s id has a control character")  # H-24\n',
        "",
        "R-130",
    ),
    "claimed_at is written again (H-24)": (
        '"claimed_at": self.claimed_at,',
        '"claimed_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),',
        "R-117",
    ),
    "claim.json is written in place (H-24)": (_REPLACED, _IN_PLACE, "R-118"),
}


@pytest.mark.spec("H-4")
@pytest.mark.spec("H-8")
@pytest.mark.spec("H-9")
@pytest.mark.spec("H-50")
@pytest.mark.spec("H-38")
@pytest.mark.spec("H-32")
@pytest.mark.spec("H-11")
@pytest.mark.spec("H-5")
@pytest.mark.spec("H-22")
@pytest.mark.spec("H-23")
@pytest.mark.spec("H-24")
@pytest.mark.spec("H-28")
@pytest.mark.spec("H-29")
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_fails_the_cases_of_its_clause_alone(
    tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runtime without a fault: `test_second_runtime_breaks_no_duty`."""
    right, wrong, numbers = FAULTS[fault]
    outcome = suite.run_suite(_changed(tmp_path, right, wrong), RunOptions(timeout_s=60))
    printed = capsys.readouterr().out
    assert outcome.numbers("failed") == set(numbers.split()), printed
    assert fault.rpartition("(")[2].rstrip(")") in printed


def _changed(directory: Path, right: str, wrong: str) -> str:
    """The command of the runtime, changed in one place."""
    text = Path(second_runtime.__file__).read_text()
    assert text.count(right) == 1
    faulty = directory / "faulty.py"
    faulty.write_text(text.replace(right, wrong))
    return f"{sys.executable} {faulty} {{registry}} {{directory}}/s.sock {{directory}}/targets"


def test_end_of_command_in_clean_up_fails_its_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the stop of a machine that has ended; R-106 ends it as well, and starts the runtime again."""
    kill = "            stopped.kill()\n"
    dies = f"            assert stopped.vm.poll() is None\n{kill}"
    options = RunOptions(only=("R-104..R-106",), timeout_s=60)
    outcome = suite.run_suite(_changed(tmp_path, kill, dies), options)
    printed = capsys.readouterr().out
    assert outcome.numbers("failed") == {"R-105"}, printed
    assert outcome.numbers("passed") == {"R-104", "R-106"}
    assert "but    clean-up: the runtime's command has ended with 1" in printed


def test_wrong_answer_to_clean_up_fails_its_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stops = '"stop": boxes.stop}'
    options = RunOptions(only=("R-101", "R-209"), timeout_s=60)
    outcome = suite.run_suite(_changed(tmp_path, stops, '"stop": lambda box: "no"}'), options)
    printed = capsys.readouterr().out
    assert outcome.numbers("failed") == {"R-101", "R-209"}, printed
    assert "clean-up: stop box-1 was answered 'no', must be ok" in printed


def test_claim_that_outlives_clean_up_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runtime keeps a copy of the lock."""
    closes = "            os.close(lock.fd)\n"
    options = RunOptions(only=("R-101..R-105",), timeout_s=60)
    outcome = suite.run_suite(_changed(tmp_path, closes, ""), options)
    printed = capsys.readouterr().out
    assert [result.case.number for result in outcome.cases] == ["R-101"], printed
    assert (set(outcome.numbers("failed")), outcome.exit_code) == ({"R-101"}, 3)
    assert "but    clean-up: the volume is still claimed; " in printed
    assert "(python" in printed.partition("still claimed")[2], "the process is named"
    assert "the clean-up of R-101 has left a volume" in printed


def test_late_answer_is_not_taken_for_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first start takes longer than the suite waits."""
    starts = "        entry = resolve(self.root, source)\n"
    hangs = "        if source.endswith('plain'):\n            sys.stdin.read()\n"
    options = RunOptions(only=("R-208..R-210",), timeout_s=5)
    outcome = suite.run_suite(_changed(tmp_path, starts, hangs + starts), options)
    printed = capsys.readouterr().out
    assert outcome.numbers("failed") == {"R-209"}, printed
    assert outcome.numbers("passed") == {"R-208", "R-210"}
    assert "within 5 s: is each answer flushed?" in printed
