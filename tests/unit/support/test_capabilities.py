"""What tests need of the machine: skipped or required; and a child that is to die is undisturbed until then."""

import gc
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import capabilities
from tests.support.faults.crashes import crash_points


@pytest.fixture(autouse=True)
def _lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capabilities._PROBES, "wings", lambda: "none grew")
    monkeypatch.setitem(capabilities._PROBES, "legs", lambda: "")


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
for package; do echo "$package" >>"$STATE/installed"; done
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


def test_forked_child_ends_no_garbage_of_its_parent() -> None:
    parent = os.getpid()

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            if os.getpid() != parent:
                os._exit(1)

    def collect(_: int) -> None:
        gc.collect()

    gc.disable()
    try:
        Garbage()
        assert list(crash_points(lambda _: None, collect)) == []
    finally:
        gc.enable()
