"""Every command of `crust` with no extra, each extra alone and all of them: it runs, or names the extra in a line."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from crust.blockdriver.ceph.user import key_of
from examples import mini_driver, second_runtime
from tests.support import chart, environments

KUBECONFIG = """apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
users: [{name: u, user: {}}]
"""
KUBERNETES = '[kubernetes]\nkubeconfig = "HERE/kubeconfig"\n'
HANDLERS = """runtime_handlers = ["kata"]
[[drivers]]
name = "csi.example.com"
socket = "/proc/none/s"
backend = "/proc/none/d"
"""
_EXTRA = "install the wheel of crust with its extra "
NOWHERE = 'socket = "/proc/none/s"\n'
SETTINGS = {
    "proxy.toml": 'run_dir = "HERE/run"\nvolumes_root = "HERE/volumes"\ntarget_roots = ["HERE"]\n'
    f"check_propagation = false\n{KUBERNETES}{HANDLERS}",
    "shim.toml": f'{NOWHERE}driver_socket = "/proc/none/d"\ntraces = true\n',
    "controller.toml": f'{NOWHERE}driver_socket = "/proc/none/d"\ncontroller = true\n{KUBERNETES}',
    "driver.toml": f'{NOWHERE}node_id = "n"\nstate_dir = "/proc/none"\n',
    "node.toml": '[proxy]\nrun_dir = "/proc/none"\n',
}
"""No daemon gets to serve: a directory or a socket cannot be made."""

WORDS = {
    "node": ("--config", "node.toml"),
    "proxy": ("--config", "proxy.toml"),
    "shim": ("--config", "shim.toml"),
    "driver init-pool": ("--state-dir", "/proc/none"),
    "describe": ("v",),
    "device-writers": ("/proc/none",),
    "bundle": ("bundle.tar.gz",),
    "completion": ("bash",),
    "config check": ("shim", "shim.toml"),
    "try": ("--handler", "kata"),
    "explain": ("NotPublishedAsBlock",),
    "policy explain": ("--driver", "d"),
    "ceph claims": ("--monitors", "127.0.0.1:1", "--user", "u", "--pool", "p"),
    "install": ("--help",),
    "uninstall": ("--help",),
}
"""What a command is called with, if not with nothing."""

NEEDED = {
    "proxy": "kubernetes",
    "shim": "otel",
    "shim --controller": "kubernetes",
}

CALLS = """
import json, signal, sys
import click
from click.testing import CliRunner
from crust.cli.main import main

def leaves(command, path=()):
    if not isinstance(command, click.Group):
        yield " ".join(path)
        return
    for name, below in command.commands.items():
        yield from leaves(below, (*path, name))

words, results = json.loads(sys.argv[1]), {}
for call in (*(leaf for leaf in leaves(main) if "cluster" not in leaf), "shim --controller"):
    signal.alarm(40)  # a command that serves would not end
    ran = CliRunner().invoke(main, [*call.split(), *words.get(call, ())])
    crashed = ran.exception is not None and not isinstance(ran.exception, SystemExit)
    results[call] = (ran.exit_code, repr(ran.exception) if crashed else "", ran.output)
print(json.dumps(results))
"""


@dataclass(frozen=True)
class Ran:
    """What a command did: its exit code, the exception that it let out, its output."""

    code: int
    crash: str
    output: str


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environments.build_wheel(tmp_path_factory.mktemp("wheel"))


def _calls(python: Path, directory: Path) -> dict[str, Ran]:
    directory.mkdir()
    for name, text in {**SETTINGS, "kubeconfig": KUBECONFIG}.items():
        (directory / name).write_text(text.replace("HERE", str(directory)))
    words = {**WORDS, "shim --controller": ("--config", "controller.toml")}
    done = subprocess.run(
        [python, "-c", CALLS, json.dumps(words)],
        cwd=directory, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {call: Ran(*ran) for call, ran in json.loads(done.stdout.splitlines()[-1]).items()}


def _wanted(wheel: Path) -> Iterator[tuple[str, ...]]:
    every = environments.extras(wheel)
    yield ()
    yield from ((extra,) for extra in every)
    yield every


def test_every_command_runs_or_names_the_extra_that_it_needs(wheel: Path, tmp_path: Path) -> None:
    for wanted in _wanted(wheel):
        name = "-".join(wanted) or "none"
        python = environments.make(tmp_path / name, wheel, wanted=wanted)
        ran = _calls(python, tmp_path / f"{name}-calls")
        assert set(WORDS) <= set(ran)
        assert {call: result.crash for call, result in ran.items() if result.crash} == {}, wanted
        lacking = {call: extra for call, extra in NEEDED.items() if extra not in wanted}
        for call, result in ran.items():
            last = result.output.strip().splitlines()[-1] if result.code else ""
            assert (_EXTRA in last) == (call in lacking), (wanted, call, result)
            if call in lacking:
                assert f"{_EXTRA}{lacking[call]}" in last
                assert result.code != 0
        assert ran["explain"].output.startswith("[NotPublishedAsBlock]\n")
        assert ran["explain"].code == 0


@pytest.fixture(scope="module")
def suites(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of an environment that has the suites and what they declare."""
    built = environments.build_wheel(tmp_path_factory.mktemp("suites"), "conformance")
    return environments.make(tmp_path_factory.mktemp("bare") / "environment", wheel, built)


def _conformance(python: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = python.with_name("crust-conformance")
    return subprocess.run([command, *flags], capture_output=True, text=True, check=False)


def test_conformance_suites_run_from_an_environment_of_their_own(
    suites: Path, tmp_path: Path
) -> None:
    given = ("--endpoint=unix:///nobody.sock", f"--target-root={tmp_path}", "--timeout-s=0.2")
    away = _conformance(suites, *given)
    assert (away.returncode, "does not answer" in away.stderr + away.stdout) == (3, True), away
    listed = _conformance(suites, "--list", "--only=C-001,C-101")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["C-001", "C-101"]


def _outcomes(directory: Path) -> dict[str, str]:
    """The outcomes of the JSON report; that of JUnit has the same cases."""
    cases = json.loads((directory / "json").read_text())["cases"]
    names = [
        case.get("name", "")[:5] for case in ElementTree.parse(directory / "xml").iter("testcase")
    ]
    assert names == [case["number"] for case in cases]
    return {case["number"]: case["outcome"] for case in cases}


@pytest.mark.root
def test_bare_environment_tests_a_driver_by_flags_of_csi_sanity(
    suites: Path, tmp_path: Path
) -> None:
    program = [suites, Path(mini_driver.__file__), tmp_path / "csi.sock", tmp_path]
    with subprocess.Popen(program) as driver:
        try:
            ran = _conformance(
                suites,
                f"-csi.endpoint=unix://{tmp_path}/csi.sock",
                f"-csi.mountdir={tmp_path}",
                f"-csi.junitfile={tmp_path}/xml",
                f"--ginkgo.json-report={tmp_path}/json",
                "--ginkgo.focus=^C-001|idempotent by name",
            )
        finally:
            driver.kill()
    assert ran.returncode == 0, ran
    assert _outcomes(tmp_path) == {"C-001": "passed", "C-103": "passed"}


@pytest.mark.root
def test_bare_environment_tests_a_runtime_without_code_of_crust(
    suites: Path, tmp_path: Path
) -> None:
    runtime = shutil.copy(second_runtime.__file__, tmp_path)
    command = f"{suites} {runtime} {{registry}} {{directory}}/s.sock {{directory}}/targets"
    reports = (f"--junit={tmp_path}/xml", f"--json={tmp_path}/json")
    ran = _conformance(suites, "--runtime", command, "--focus=claim.lock|claimed_at", *reports)
    assert ran.returncode == 0, ran
    assert _outcomes(tmp_path) == {"R-117": "passed", "R-226": "passed"}


CEPH = chart.objects(chart.choice("ceph"))
KEY = "AQDNsHFnAAAAABAAo0Ue0rJZqEqXn3pL7bYwUQ=="


@dataclass(frozen=True)
class Pod:
    """The two directories of the container, by their paths in it, and who it runs as."""

    init: Any
    user: int
    directories: dict[str, Path]

    def at(self, path: str) -> str:
        """Where a path of the container is here."""
        for inside, outside in self.directories.items():
            path = path.replace(inside, str(outside), 1) if path.startswith(inside) else path
        return path

    def run(self) -> "subprocess.CompletedProcess[str]":
        """What the container runs, with its user and without capabilities."""
        user = str(self.user)
        groups = (f"--reuid={user}", f"--regid={user}", f"--groups={user}")
        nothing = ("--no-new-privs", "--bounding-set=-all", "--inh-caps=-all")
        command = [self.at(word) for word in self.init["command"]]
        return subprocess.run(
            ["setpriv", *groups, *nothing, *command], capture_output=True, text=True, check=False
        )

    def asked(self, call: Callable[[], str]) -> str:
        """What a call returns, or the name of its error, in a process of the container's user."""
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.setgroups([self.user])
                os.setgid(self.user)
                os.setuid(self.user)
                answer = call()
            except Exception as err:
                answer = getattr(err, "error_name", type(err).__name__)
            os.write(writing, answer.encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answered:
            text = answered.read()
        os.waitpid(child, 0)
        return text


@pytest.fixture(params=[0o440, 0o644], ids=["0440", "0644"])
def pod(request: pytest.FixtureRequest) -> Iterator[Pod]:
    """The directories as a kubelet makes them: files of root and the fsGroup; all may write to the emptyDir."""
    spec = chart.one(CEPH, "Deployment")["spec"]["template"]["spec"]
    context = spec["securityContext"]
    [init] = spec["initContainers"]
    assert context["fsGroup"] == context["runAsGroup"] == context["runAsUser"]
    assert init["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    # its parents let the user through
    with tempfile.TemporaryDirectory(prefix="crust-") as base:
        os.chmod(base, 0o755)
        directories = {
            mount["mountPath"]: Path(base) / mount["name"] for mount in init["volumeMounts"]
        }
        for mount in init["volumeMounts"]:
            path = directories[mount["mountPath"]]
            path.mkdir()
            os.chown(path, 0, context["fsGroup"])
            if mount.get("readOnly"):
                _fill(path, context["fsGroup"], request.param)
            else:
                path.chmod(0o2777)
        yield Pod(init, context["runAsUser"], directories)


def _fill(path: Path, group: int, mode: int) -> None:
    """A Secret with the key `key`: a link to a file in a directory that is replaced atomically."""
    version = path / "..2026_11_22_10_00_00.1"
    version.mkdir()
    (version / "key").write_text(KEY)
    (path / "..data").symlink_to(version.name)
    (path / "key").symlink_to("..data/key")
    os.chown(version, 0, group)
    version.chmod(0o2755)
    os.chown(version / "key", 0, group)
    (version / "key").chmod(mode)
    path.chmod(0o3755)


@pytest.mark.root
def test_copy_is_the_users_alone_and_survives_a_restart(pod: Pod) -> None:
    settings = chart.settings(CEPH, "controller.toml")
    assert 'key_file = "/etc/crust-ceph/key"' in settings
    copy = Path(pod.at("/etc/crust-ceph/key"))
    for _ in range(2):
        done = pod.run()
        assert (done.returncode, done.stderr) == (0, "")
        status = copy.lstat()
        assert (status.st_uid, status.st_mode & 0o7777) == (pod.user, 0o600)
        assert pod.asked(lambda: key_of(str(copy), "crust-controller")) == KEY


@pytest.mark.root
def test_file_of_the_secret_itself_is_refused(pod: Pod) -> None:
    """Else the init container would do nothing."""
    path = pod.at("/secret/key")
    asked = pod.asked(lambda: key_of(path, "crust-controller"))
    assert asked == "CephKeyFileUnusable"


RULES = chart.CHART / "files"
TESTS = chart.CHECKOUT / "deploy" / "prometheus"


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", str(RULES / "crust-rules.yaml")),
        ("test", "rules", "crust-rules.test.yaml"),
    ],
)
def test_rules_are_what_promtool_accepts(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=TESTS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout + done.stderr


def test_each_alert_is_tested() -> None:
    named = [
        line.split(": ")[1]
        for line in (RULES / "crust-rules.yaml").read_text().splitlines()
        if "- alert:" in line
    ]
    tested = (TESTS / "crust-rules.test.yaml").read_text()
    assert len(named) > 5
    assert [alert for alert in named if f"alertname: {alert}\n" not in tested] == []
