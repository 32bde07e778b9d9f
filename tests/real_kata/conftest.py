"""A node with a real Kata runtime, which `make kata NODE=DIR` names; docs/kata.md says what DIR holds.

crust's daemons run in that node's namespaces, from this environment, beside a driver of another vendor's making that
crust wraps. Each test has a volume of its own.
"""

import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from crust.wire.csi.v1 import csi_pb2
from examples.drivers import cloud
from tests.real_kata.orchestrator import DRIVERS

ROOT = Path(__file__).parents[2]
Volume = tuple[str, str]
"""A volume's name, and its target."""
NO_DEVICE = "/dev/crust-no-device-until-claimed/"
_CALL_S = 200.0
_SERVES = {"node": "proxy serves", "kata": "registered with the proxy"}
_INNER, _SHIM = "/run/crust-vendor-driver.sock", "/run/crust/shim-vendor/csi.sock"
_NODE = f"""
[[proxy.drivers]]
name = "block.csi.crust.dev"
socket = "{DRIVERS["own"].socket}"
backend = "/run/crust/shim/csi.sock"
[[proxy.drivers]]
name = "{cloud.NAME}"
socket = "{DRIVERS["wrapped"].socket}"
backend = "{_SHIM}"
[[shim]]
[[shim]]
socket = "{_SHIM}"
driver_socket = "{_INNER}"
[driver]
create_pool = true
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command printed, and whether it succeeded."""

    is_ok: bool
    text: str


@dataclass
class Daemon:
    """A daemon of crust in the node."""

    process: "subprocess.Popen[bytes]"

    def pids(self) -> list[int]:
        """The daemon; the process that was started waits for it."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children] or [pid]

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal, and wait until it has ended; idempotent."""
        if self.process.poll() is None:
            for pid in self.pids():
                os.kill(pid, number)
            self.process.wait(60)


@dataclass
class KataNode:
    """The node of `make kata`, and the runtime that is tested."""

    directory: Path
    handler: str
    configuration: Path
    is_rust: bool
    hypervisor: str
    """Its table's name in Kata's configuration."""
    state: Path

    @property
    def has_orphans(self) -> bool:
        """Whether a machine outlives its shim: the engine's clean-up ends QEMU by the state of the Go runtime."""
        return self.is_rust or self.hypervisor != "qemu"

    def __post_init__(self) -> None:
        self.drop_in = self.configuration.parent / "config.d" / "99-crust-test.toml"
        driver = ("--socket", _INNER, "--state-dir", "/var/lib/crust/vendor", "--node-id", "node")
        shim = ("--controller", "--no-check-detach", f"--driver-socket={_INNER}")
        at = f"--socket={DRIVERS['wrapped'].controller}"
        self.vendor = (
            self.program("vendor", cloud.__name__, *driver),
            self.program("controller", "crust", "shim", *shim, at),
        )
        self.crust = self.daemon("node")

    def run(self, *command: str) -> Answer:
        """Run a command in the node's namespaces."""
        return _answer([str(self.directory / "run" / "in.sh"), *command])

    def cri(self, *command: str, handler: str = "", attempt: int = 0) -> Answer:
        """The node's CRI client. `attempt` counts the sandboxes of one pod."""
        environment = {**os.environ, "HANDLER": handler or self.handler, "ATTEMPT": str(attempt)}
        return _answer([str(self.directory / "run" / "cri"), *command], environment)

    def daemon(self, name: str) -> "Daemon":
        """Start `crust <name>` in the node, and wait until it serves."""
        path, mark = self.state / f"{name}.log", _SERVES[name]
        before = path.read_text().count(mark) if path.exists() else 0
        config = str(self.state / f"{name}.toml")
        process = self.program(name, "crust", name, "--config", config)
        self.wait(lambda: path.read_text().count(mark) > before)
        return process

    def program(self, name: str, *module: str) -> "Daemon":
        """Start a module of Python in the node; it writes to a log of that name."""
        command = [str(self.directory / "run" / "in.sh"), sys.executable, "-m", *module]
        with open(self.state / f"{name}.log", "ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        return Daemon(process)

    def crust_command(self, *words: str) -> Answer:
        """A command of crust for operators, in the node."""
        return self.run(sys.executable, "-m", "crust", *words)

    def wait(self, is_so: Callable[[], object]) -> None:
        """Until a condition holds; a minute at most."""
        for _ in range(600):
            if is_so():
                return
            time.sleep(0.1)
        raise AssertionError("it has not happened within a minute")

    def co(self, command: str, name: str) -> Answer:
        """Call CSI as a kubelet and the sidecars do, for a volume of that name: see `orchestrator`."""
        program = str(ROOT / "tests" / "real_kata" / "orchestrator.py")
        return self.run(sys.executable, program, command, name, self.handler, str(self.state))

    def taken_down(self, name: str) -> bool:
        """Whether a volume is unpublished, unstaged and deleted now."""
        return self.co("down", name).is_ok

    def formatted(self, name: str) -> int:
        """How often the proxy has made the filesystem of a volume."""
        volume = csi_pb2.Volume.FromString((self.state / f"{name}.volume").read_bytes())
        lines = (self.state / "node.log").read_text().splitlines()
        return sum("filesystem made" in line and volume.volume_id in line for line in lines)

    def entries(self) -> dict[str, str]:
        """Kata's entries: device by name."""
        script = "cd /run/kata-containers/shared/direct-volumes && for f in */mountInfo.json; do cat $f; echo; done"
        lines = self.run("sh", "-c", script).text.splitlines()
        return {
            str(at): json.loads(line)["device"]
            for at, line in enumerate(lines)
            if line.startswith("{")
        }

    def device(self, target: str) -> str:
        """The device of a published volume."""
        digest = hashlib.sha256(target.encode()).hexdigest()
        record = self.run("cat", f"/run/crust/volumes/{digest}/mountInfo.json").text
        return str(json.loads(record)["device"])

    def machines(self, pod: str = "") -> list[str]:
        """The processes of the node's virtual machines, or of one sandbox's."""
        return self.run("pgrep", "-f", "--", f"(api-socket|-name sandbox-).*{pod}").text.split()

    def open_in_machines(self) -> str:
        """What the virtual machines of the node have open."""
        return self.run("ls", "-l", *(f"/proc/{pid}/fd" for pid in self.machines())).text

    def kill(self, pids: list[str]) -> None:
        """End processes of the node at once."""
        self.run("kill", "-9", *pids)

    def kill_shim(self, pod: str) -> None:
        """End the shim of a sandbox at once."""
        self.kill(self.run("pgrep", "-f", f"containerd-shim-kata.*{pod}").text.split())

    def pod(
        self, name: str, handler: str = "", *, attempt: int = 0, annotations: str = "{}"
    ) -> str:
        """A sandbox; returns its id."""
        answer = self.cri("pod", name, f"uid-{name}", annotations, handler=handler, attempt=attempt)
        assert answer.is_ok, answer.text
        return answer.text.splitlines()[-1]

    def container(
        self, pod: str, name: str, source: str, script: str = "sleep 1000", **mount: object
    ) -> Answer:
        """Create and start a container with one mount; with an empty source without any."""
        mounts = [{"host": source, "ctr": "/data", **mount}] if source else []
        return self.cri("ctr", pod, name, json.dumps(mounts), "/bin/sh", "-c", script)

    def started(
        self, pod: str, name: str, source: str, script: str = "sleep 1000", **mount: object
    ) -> str:
        """The same, which must succeed; returns the container's id."""
        answer = self.container(pod, name, source, script, **mount)
        assert answer.is_ok, answer.text
        return answer.text.splitlines()[-1]

    def is_hidden(self) -> bool:
        """Whether no entry of Kata's names a device."""
        return all(device.startswith(NO_DEVICE) for device in self.entries().values())

    def sandboxes(self) -> list[str]:
        """Ids of Kata's sandboxes, orphans too."""
        return self.run("sh", "-c", "ls /run/vc/sbs /run/kata 2>/dev/null | grep -v :").text.split()

    def end_pod(self, pod: str) -> None:
        """Stop and remove a sandbox."""
        assert self.cri("stopp", pod).is_ok
        assert self.cri("rmp", pod).is_ok

    def end_orphan(self, sandbox_id: str, target: str) -> None:
        """Wait until `crust kata` has noticed the machine that lost its shim, and end it as an operator does."""
        self.wait(lambda: "SandboxOrphaned" in str(self.claim()))
        ended = self.crust_command("end-orphan", "--yes", target)
        assert ended.is_ok, ended.text
        assert f", sandbox {sandbox_id}: the volume " in ended.text

    def claim(self) -> dict[str, object]:
        """The one claim of the node; empty without one."""
        text = self.run("sh", "-c", "cat /run/crust/volumes/*/claim.json").text
        return json.loads(text) if text.startswith("{") else {}


def _answer(command: list[str], environment: dict[str, str] | None = None) -> Answer:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_CALL_S, check=False, env=environment
    )
    return Answer(done.returncode == 0, f"{done.stdout}{done.stderr}".strip())


def _runtimes() -> dict[str, tuple[str, str, str]]:
    """KATA_RUNTIMES: name=configuration or name=configuration:shim, separated by commas."""
    pairs = (pair.split("=", 1) for pair in os.environ.get("KATA_RUNTIMES", "").split(",") if pair)
    return {name: paths.partition(":") for name, paths in pairs}


@pytest.fixture(scope="session", params=sorted(_runtimes()) or ["(none)"])
def node(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KataNode]:
    """The node with crust's daemons, for one runtime after the other."""
    directory = Path(os.environ.get("KATA_NODE", "/nonexistent"))
    for needed in ("run/in.sh", "run/cri"):
        if not (directory / needed).exists():
            pytest.exit(
                f"{directory / needed} is missing: name a node in NODE, see docs/kata.md", 2
            )
    if request.param == "(none)":
        pytest.exit("RUNTIMES is empty: name=configuration.toml,…, see docs/kata.md", 2)
    state = tmp_path_factory.mktemp("crust")
    configured = "".join(
        f'[[runtimes]]\nname = "{name}"\nconfiguration = "{path}"\nshim = "{shim}"\n'
        for name, (path, _, shim) in _runtimes().items()
    )
    (state / "kata.toml").write_text(f'default_runtime = "runc"\n{configured}')
    (state / "node.toml").write_text(_NODE)
    configuration = Path(_runtimes()[request.param][0])
    read = tomllib.loads(configuration.read_text())
    (hypervisor,) = read["hypervisor"]
    is_rust = "name" in read["runtime"]
    made = KataNode(directory, str(request.param), configuration, is_rust, hypervisor, state)
    try:
        yield made
    finally:
        for service in (made.crust, *made.vendor):
            service.end()


@pytest.fixture
def bridge(node: KataNode) -> Iterator[Daemon]:
    """`crust kata`, which a test may kill."""
    process = node.daemon("kata")
    yield process
    process.end()


@pytest.fixture
def publish(node: KataNode, bridge: object) -> Iterator[Callable[[str], Volume]]:
    """Publishes a volume of a kind, as `orchestrator` reads it."""
    names: list[str] = []

    def published(kind: str) -> Volume:
        names.append(f"{kind}-{secrets.token_hex(3)}")
        answer = node.co("up", names[-1])
        assert answer.is_ok, answer.text
        node.wait(lambda: len(node.entries()) >= len(names))
        return names[-1], answer.text.splitlines()[-1]

    yield published
    for pod in node.sandboxes():
        node.cri("stopp", pod)
        node.cri("rmp", pod)
        node.kill(node.machines(pod))  # an orphan
    node.wait(lambda: not node.machines())
    for name in names:
        node.wait(partial(node.taken_down, name))


@pytest.fixture
def volume(request: pytest.FixtureRequest, publish: Callable[[str], Volume]) -> Volume:
    """A published volume; it is crust's own driver's unless a test says `wrapped`."""
    return publish(getattr(request, "param", "own"))


@pytest.fixture
def unit() -> Iterator[Path]:
    """A control group that is named as a unit's; it goes with those that were made beside it."""
    roots = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
    slice_ = next(path for path in roots if (path / "cgroup.procs").exists())
    slice_ /= f"crust-{secrets.token_hex(3)}"
    (slice_ / "crust-kata.service").mkdir(parents=True)
    yield slice_ / "crust-kata.service"
    for group in (*slice_.iterdir(), slice_):
        if group.is_dir():
            group.rmdir()
