"""Every command of `crust` with no extra, each extra alone and all of them: it runs, or names the extra in a line."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import environments

pytestmark = pytest.mark.timeout(120)

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
NOWHERE = 'socket = "/proc/none/s"\n'
SETTINGS = {
    "proxy.toml": f'run_dir = "HERE/run"\ntarget_roots = ["HERE"]\ncheck_propagation = false\n{KUBERNETES}{HANDLERS}',
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
    "driver manifest": ("--config", "driver.toml", "objects"),
    "describe": ("v",),
    "bundle": ("bundle.tar.gz",),
    "completion": ("bash",),
    "config check": ("shim", "shim.toml"),
    "conformance": ("--list",),
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
    "conformance": "conformance",
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
for call in (*(each for each in leaves(main) if "cluster" not in each), "shim --controller"):
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
    yield from ((each,) for each in every)
    yield every


def test_every_command_runs_or_names_the_extra_that_it_needs(wheel: Path, tmp_path: Path) -> None:
    for wanted in _wanted(wheel):
        name = "-".join(wanted) or "none"
        python = environments.make(tmp_path / name, wheel, wanted)
        ran = _calls(python, tmp_path / f"{name}-calls")
        assert set(WORDS) <= set(ran)
        assert {call: each.crash for call, each in ran.items() if each.crash} == {}, wanted
        lacking = {call: extra for call, extra in NEEDED.items() if extra not in wanted}
        for call, each in ran.items():
            last = each.output.strip().splitlines()[-1] if each.code else ""
            assert ("crust-csi[" in last) == (call in lacking), (wanted, call, each)
            if call in lacking:
                assert f"crust-csi[{lacking[call]}]" in last
                assert each.code != 0
        assert ran["explain"].output.startswith("[NotPublishedAsBlock]\n")
        assert ran["explain"].code == 0
