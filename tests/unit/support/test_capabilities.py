"""What tests need of the machine: skipped or required, and installed without a service that starts."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import capabilities
from tests.support.faults import sync_trace


@pytest.fixture(autouse=True)
def _lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capabilities._PROBES, "wings", lambda: "none grew")
    monkeypatch.setitem(capabilities._PROBES, "legs", lambda: "")


def test_what_is_there_lets_the_test_run() -> None:
    capabilities.need("legs")


def test_what_is_missing_skips_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTS_REQUIRE", "mount,loop")
    with pytest.raises(pytest.skip.Exception, match="needs wings: none grew"):
        capabilities.need("legs", "wings")


def test_what_is_missing_and_required_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTS_REQUIRE", "mount,wings")
    with pytest.raises(pytest.fail.Exception, match="wings is required and missing"):
        capabilities.need("wings")


SCRIPT = Path(__file__).parents[2] / "install_packages.sh"
DPKG_QUERY = 'for last; do :; done; grep -qx "$last" "$STATE/installed" && echo "ii "'
APT_GET = """
echo "apt-get $*" >>"$STATE/calls"
case "$*" in *" install "*) ;; *) exit 0;; esac
for daemon in prometheus containerd ceph-mon@a.service ssh; do
    "$POLICY" "$daemon" start; echo "$daemon $?" >>"$STATE/asked"
done
[ ! -e "$STATE/fails" ] || exit 100
for each; do echo "$each" >>"$STATE/installed"; done
"""
DPKG = 'printf "/usr/share/doc\\n/lib/systemd/system/%s.service\\n/lib/systemd/system/%s@.service\\n" "$2" "$2"'
PROGRAMS = {
    "dpkg-query": DPKG_QUERY,
    "apt-get": APT_GET,
    "dpkg": DPKG,
    "systemctl": 'echo "systemctl $*" >>"$STATE/calls"',
    "id": "echo 0",
}


@dataclass(frozen=True, slots=True)
class Machine:
    state: Path

    @property
    def policy(self) -> Path:
        return self.state / "policy-rc.d"

    def install(self, *packages: str) -> "subprocess.CompletedProcess[str]":
        environment = {
            **os.environ,
            "PATH": f"{self.state / 'bin'}:{os.environ['PATH']}",
            "STATE": str(self.state),
            "POLICY": str(self.policy),
        }
        argv = ["bash", str(SCRIPT), *packages]
        return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)

    def lines(self, name: str) -> Sequence[str]:
        path = self.state / name
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "bin").mkdir()
    for name, text in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    (tmp_path / "installed").write_text("strace\n")
    return Machine(tmp_path)


def disabled(machine: Machine) -> set[str]:
    return {line.split()[-1] for line in machine.lines("calls") if line.startswith("systemctl")}


def test_daemon_is_not_started_and_disabled(machine: Machine) -> None:
    done = machine.install("strace", "prometheus", "containerd", "jq")
    assert done.returncode == 0, done.stderr
    assert set(machine.lines("asked")) == {
        "prometheus 101", "containerd 101", "ceph-mon@a.service 101", "ssh 0",
    }  # fmt: skip
    assert disabled(machine) == {"prometheus.service", "containerd.service"}
    assert not machine.policy.exists()


def test_daemon_that_the_machine_had_is_left_alone(machine: Machine) -> None:
    with (machine.state / "installed").open("a") as installed:
        installed.write("prometheus\n")
    assert machine.install("prometheus", "jq").returncode == 0
    assert disabled(machine) == set()


def test_policy_that_the_machine_has_is_kept(machine: Machine) -> None:
    machine.policy.write_text("#!/bin/sh\nexit 42\n")
    machine.policy.chmod(0o755)
    assert machine.install("prometheus").returncode == 0
    assert set(machine.lines("asked")) == {
        "prometheus 42", "containerd 42", "ceph-mon@a.service 42", "ssh 42",
    }  # fmt: skip
    assert machine.policy.read_text() == "#!/bin/sh\nexit 42\n"


def test_policy_is_removed_when_the_installation_fails(machine: Machine) -> None:
    (machine.state / "fails").touch()
    done = machine.install("prometheus")
    assert (done.returncode, machine.policy.exists()) == (1, False)
    assert "cannot be installed" in done.stderr


def test_nothing_is_called_when_nothing_is_missing(machine: Machine) -> None:
    assert machine.install("strace").returncode == 0
    assert machine.lines("calls") == []


POOL = "/p/state"
RECORDS = f"{POOL}/records"
ASIDE, RECORD = f"{RECORDS}/.v.json.aa.crust-tmp", f"{RECORDS}/v.json"
IMAGE = f"{POOL}/images/v.img"

IMAGE_MADE = (
    f'9 openat(AT_FDCWD</>, "{IMAGE}", O_RDWR|O_CREAT, 0600) = 6<{IMAGE}>',
    f"9 ftruncate(6<{IMAGE}>, 4096) = 0",
    f"9 fsync(6<{IMAGE}>) = 0",
    f"9 fsync(6<{POOL}/images>) = 0",
)
RECORD_WRITTEN = (
    f'9 openat(AT_FDCWD</>, "{ASIDE}", O_WRONLY|O_CREAT|O_EXCL, 0600) = 6<{ASIDE}>',
    f'9 write(6<{ASIDE}>, "{{\\"schema\\""..., 40) = 40',
    f"9 fsync(6<{ASIDE}>) = 0",
    f'9 rename("{ASIDE}", "{RECORD}") = 0',
    f'9 unlink("{ASIDE}") = -1 ENOENT (No such file or directory)',
    f"9 fsync(6<{RECORDS}>) = 0",
)
FORMATTED = (
    '10 pwrite64(3</dev/loop4<block 7:4>>, "\\0"..., 4096, 0) = 4096',
    "10 fsync(3</dev/loop4<block 7:4>>) = 0",
)
ASIDE_VOLUME, VOLUME = f"{POOL}/volumes/.new-v", f"{POOL}/volumes/v"
VOLUME_MADE = (
    f'9 mkdir("{ASIDE_VOLUME}", 0700) = 0',
    f'9 openat(AT_FDCWD</>, "{ASIDE_VOLUME}/v.img", O_RDWR|O_CREAT, 0600) = 6<{ASIDE_VOLUME}/v.img>',
    f"9 ftruncate(6<{ASIDE_VOLUME}/v.img>, 4096) = 0",
    f'9 openat(AT_FDCWD</>, "{ASIDE_VOLUME}/v.json", O_WRONLY|O_CREAT, 0600) = 7<{ASIDE_VOLUME}/v.json>',
    f'9 write(7<{ASIDE_VOLUME}/v.json>, "{{\\"schema\\""..., 40) = 40',
    f"9 fsync(7<{ASIDE_VOLUME}/v.json>) = 0",
    f"9 fsync(6<{ASIDE_VOLUME}/v.img>) = 0",
    f"9 fsync(6<{ASIDE_VOLUME}>) = 0",
    f'9 rename("{ASIDE_VOLUME}", "{VOLUME}") = 0',
    f"9 fsync(6<{POOL}/volumes>) = 0",
)
VOLUME_REMOVED = (
    f'9 rename("{VOLUME}", "{POOL}/volumes/.gone-v") = 0',
    f"9 fsync(6<{POOL}/volumes>) = 0",
    f'9 unlink("{POOL}/volumes/.gone-v/v.img") = 0',
    f'9 rmdir("{POOL}/volumes/.gone-v") = 0',
)
START = '9 rmdir("/answered/start") = -1 ENOENT (No such file or directory)'
ANSWER = '9 rmdir("/answered/CreateVolume") = -1 ENOENT (No such file or directory)'
LIFE = (
    START, *IMAGE_MADE, *RECORD_WRITTEN, *FORMATTED, *RECORD_WRITTEN, ANSWER,
    *VOLUME_MADE, ANSWER, *VOLUME_REMOVED, ANSWER,
)  # fmt: skip


def late(*lines: str) -> list[str]:
    return list(sync_trace.late(POOL, sync_trace.events(lines, POOL)))


def test_a_life_in_which_each_step_is_synced_breaks_no_rule() -> None:
    assert late(*LIFE) == []


@pytest.mark.parametrize("place", [n for n, line in enumerate(LIFE) if "fsync" in line])
def test_a_life_without_one_of_its_syncs_breaks_a_rule(place: int) -> None:
    assert late(*LIFE[:place], *LIFE[place + 1 :])


def test_a_record_that_is_synced_after_its_rename_breaks_a_rule() -> None:
    opened, written, synced, named, gone, listed = RECORD_WRITTEN
    assert late(START, opened, written, named, synced, gone, listed, ANSWER)


def test_a_record_before_its_image_breaks_no_rule_but_an_image_without_its_sync_does() -> None:
    assert late(START, *RECORD_WRITTEN, *IMAGE_MADE, ANSWER) == []
    assert late(START, *IMAGE_MADE[:2], *RECORD_WRITTEN, *IMAGE_MADE[2:], ANSWER)


def test_a_sync_that_began_before_the_write_ended_does_not_count() -> None:
    opened, written, _, named, gone, listed = RECORD_WRITTEN
    crossed = (
        f"11 fsync(6<{ASIDE}> <unfinished ...>",
        written,
        "11 <... fsync resumed>) = 0",
    )
    assert late(START, opened, *crossed, named, gone, listed, ANSWER)


def test_a_removed_name_is_to_be_synced_and_a_temporary_one_is_not() -> None:
    assert late(START, f'9 unlink("{RECORD}") = 0', ANSWER)
    assert late(START, f'9 unlink("{RECORD}") = 0', RECORD_WRITTEN[-1], ANSWER) == []
    assert late(START, f'9 unlink("{ASIDE}") = 0', ANSWER) == []


def test_what_is_outside_of_the_pool_need_not_be_synced() -> None:
    assert late(START, '9 write(4</p/run/boot/x.json>, "x", 1) = 1', ANSWER) == []
    assert late(START, '9 write(4</p/state/records.reserve>, "x", 1) = 1', ANSWER) == []
