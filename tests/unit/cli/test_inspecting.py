"""`crust status`, `volumes`, `handlers`, `drivers`, `describe` on a running proxy; orphans, `crust end-orphan`."""

import asyncio
import datetime
import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import grpc
import pytest
import pytest_asyncio
from click.testing import Result

import crust as crust_package
from crust.core import volumes
from crust.handoff import claims, layout
from crust.host import start_questions
from crust.host.process import hidden
from crust.runtime_handler import keepers, process_of
from tests.support.co import NAMED
from tests.support.drivers import fake_driver
from tests.support.kata.sandbox import a_shim
from tests.support.nodes.fake_node import DRIVER, FakeNode
from tests.support.nodes.places import Places
from tests.unit.cli.conftest import crust, invoked


@pytest_asyncio.fixture
async def node(places: Places) -> AsyncIterator[FakeNode]:
    async with FakeNode(places, driver=fake_driver.FakeDriver()) as running, running.handler():
        yield running


async def published(node: FakeNode, volume: str = "vol-1", pod: str = "pod-1") -> str:
    target = node.places.target(pod)
    await node.co.publish(volume, target)
    return target


async def test_node_that_is_ready_exits_0(node: FakeNode) -> None:
    result = await crust(node, "status", "-o", "json")
    status = json.loads(result.output)
    assert (result.exit_code, status["ready"], status["problems"]) == (0, True, [])
    assert [driver["state"] for driver in status["drivers"]] == ["ready"]


async def test_driver_that_is_starting_makes_status_exit_1(node: FakeNode) -> None:
    node.driver.ready = False
    result = await crust(node, "status", "-o", "name")
    assert (result.exit_code, result.output) == (1, f"driver {DRIVER}\n")
    table = await crust(node, "drivers")
    assert table.exit_code == 1
    assert "[DriverNotReady]" in table.output
    whole = await crust(node, "status")
    assert whole.output.count("answers Probe with ready = false") == 1, "a sentence is said once"


async def test_status_without_handler_exits_1_with_advice(places: Places) -> None:
    async with FakeNode(places) as node:
        result = await crust(node, "status")
    assert result.exit_code == 1
    assert "HandlerNotRegistered" in result.output
    assert "start the runtime's daemon" in result.output


async def test_driver_that_is_away_is_named_without_grpcs_words(places: Places) -> None:
    async with FakeNode(places, backend=f"{places.root}/nobody.sock") as node:
        result = await crust(node, "drivers")
    assert result.exit_code == 1
    assert "the socket does not exist; start crust-shim" in result.output
    assert "failed to connect" not in result.output


async def test_silent_proxy_is_reported_with_advice(places: Places) -> None:
    os.mkdir(places.run)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(places.sockets.inspect)
    for command, run_dir, code, says in (
        ("status", places.root, 3, "the socket does not exist; start crust-node or crust-proxy"),
        ("volumes", places.run, 3, "the socket is stale"),
        ("status", "relative", 2, "it is not absolute"),
    ):
        result = await invoked(command, "--run-dir", run_dir)
        assert (result.exit_code, says in result.output) == (code, True), result.output


@pytest.mark.parametrize("word", ["help", "version"])
async def test_word_that_is_an_option_here_is_suggested_as_one(word: str) -> None:
    result = await invoked(word)
    assert result.exit_code == 2
    assert f"Did you mean '--{word}'?" in result.output


async def test_filters_admit_what_matches_alone(node: FakeNode) -> None:
    one, two = await published(node), await published(node, "vol-2", "pod-2")
    for words, names in (
        (("--target", one), ["vol-1"]),
        (("--pod", "pod-2"), ["vol-2"]),
        (("--state", "published", "--driver", DRIVER, "--handler", "kata"), ["vol-1", "vol-2"]),
        (("--state", "mounted"), []),
    ):
        result = await crust(node, "volumes", "-o", "name", *words)
        assert sorted(result.output.split()) == names
    assert two in (await crust(node, "volumes", "-o", "wide")).output


async def test_status_exits_1_for_handler_with_unseen_socket(
    places: Places,
) -> None:
    async with FakeNode(places) as node, node.handler():
        assert (await crust(node, "handlers")).exit_code == 0
        os.rename(places.handler, f"{places.handler}.elsewhere")
        status = await crust(node, "status")
        assert (status.exit_code, status.output.count("which does not exist where")) == (1, 1)
        assert (await crust(node, "handlers")).exit_code == 1
        os.rename(f"{places.handler}.elsewhere", places.handler)


async def test_volume_is_found_by_pod_persistent_volume_target_and_id(node: FakeNode) -> None:
    pod = {"csi.storage.k8s.io/pod.namespace": "shop", "csi.storage.k8s.io/pod.name": "db-0"}
    target = f"{node.places.kubelet}/pods/uid-1/volumes/kubernetes.io~csi/pv-1/mount"
    os.makedirs(os.path.dirname(target))
    await node.co.publish("vol-1", target, volume_context={**NAMED, **pod})
    await published(node, "vol-2", "pod-2")
    assert "shop/db-0" in (await crust(node, "volumes")).output
    for words in (("--pod", "shop/db-0"), ("--pod", "db-0")):
        assert (await crust(node, "volumes", "-o", "name", *words)).output == "vol-1\n"
    for name in ("shop/db-0", "pv-1", target, "vol-1"):
        assert "volume        vol-1" in (await crust(node, "describe", name)).output
    unknown = await crust(node, "describe", "vol-9")
    assert (unknown.exit_code, "[VolumeNotDeferred]" in unknown.output) == (1, True)


async def test_described_volume_has_sandbox_process_times_and_request(node: FakeNode) -> None:
    target = await published(node)
    (record,) = Path(node.places.run, "volumes").glob("*/mountInfo.json")
    request_id = json.loads(record.read_text())["crust"]["request_id"]
    with node.sandbox(target):
        result = await crust(node, "describe", "vol-1", "-o", "json")
        text = (await crust(node, "describe", target)).output
    (volume,) = json.loads(result.output)["volumes"]
    assert volume["claimed_by_pid"] == os.getpid()
    assert volume["published_at"]
    assert volume["request_id"] == request_id != ""
    comm = Path("/proc/self/comm").read_text().strip()
    for line in (
        f"target        {target}",
        f"held by       {comm}[{os.getpid()}]",
        f"request id    {request_id}",
    ):
        assert line in text
    assert request_id in (await crust(node, "volumes", "-o", "wide")).output
    assert request_id not in (await crust(node, "volumes")).output


async def test_status_warns_of_other_versions_and_node_stays_ready(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemons of this test run in this process: they are asked at each call."""
    (driver,) = json.loads((await crust(node, "drivers", "-o", "json")).output)["drivers"]
    assert driver["shim_version"] == crust_package.__version__
    before = await crust(node, "status", "-o", "json")
    assert (json.loads(before.output)["warnings"], before.exit_code) == ([], 0)
    monkeypatch.setattr("crust.csi_shim.shim_process.crust", mock.Mock(__version__="0.0.9"))
    monkeypatch.setattr("crust.proxy.inspect.crust", mock.Mock(__version__="0.0.8"))
    result = await crust(node, "status", "-o", "json")
    status = json.loads(result.output)
    assert (result.exit_code, status["ready"]) == (0, True)
    assert [warning["part"] for warning in status["warnings"]] == [
        "the proxy",
        f"the shim of driver {DRIVER}",
    ]
    table = (await crust(node, "status")).output
    assert "runs 0.0.9, installed is" in table
    assert "crust is ready" in table


async def test_status_warns_of_excepted_groups_and_node_stays_ready(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden, "_excepted", ())
    hidden.except_groups(["/system.slice/agent.service"])
    await start_questions.report((), node.value("proxy").health)
    result = await crust(node, "status", "-o", "json")
    status = json.loads(result.output)
    assert (result.exit_code, status["ready"], status["problems"]) == (0, True, [])
    (warning,) = status["warnings"]
    assert warning["error_name"] == "ControlGroupsExcepted"
    assert "/system.slice/agent.service" in warning["message"]


async def test_stopped_driver_is_not_looked_for_at_proxys_socket(node: FakeNode) -> None:
    away = fake_driver.Failure(grpc.StatusCode.UNAVAILABLE, "failed to connect")
    node.driver.failing["Probe"] = away
    result = await crust(node, "drivers")
    assert f"its own socket, which the shim at {node.places.shim} calls" in result.output
    assert "failed to connect" not in result.output


@asynccontextmanager
async def _started(
    node: FakeNode, *words: str, stdout: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command, which is killed where a test fails before it has ended."""
    arguments = (*words, "--watch", "--run-dir", node.places.run)
    environ = {**os.environ, "TERM": "xterm"}
    # a run that a shell has started in the background ignores SIGINT
    handled = ("env", "--default-signal=INT")
    process = await asyncio.create_subprocess_exec(
        *handled, sys.executable, "-m", "crust", *arguments, stdout=stdout, env=environ
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_watch_prints_each_change_and_ctrl_c_exits_130(node: FakeNode) -> None:
    watch = _started(node, "volumes", "-o", "json", stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(60), watch as process:
        assert process.stdout is not None
        assert json.loads(await process.stdout.readline()) == {"volumes": []}
        await published(node)
        listed = json.loads(await process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130
    assert [volume["volume_id"] for volume in listed["volumes"]] == ["vol-1"]


async def test_watch_on_a_terminal_restores_it(node: FakeNode) -> None:
    leader, follower = pty.openpty()
    text = b""
    try:
        async with asyncio.timeout(60), _started(node, "volumes", stdout=follower) as process:
            os.close(follower)
            while b"SANDBOX" not in text:
                text += await asyncio.to_thread(os.read, leader, 4096)
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 130
            while b"\x1b[?1049l" not in text:
                text += await asyncio.to_thread(os.read, leader, 4096)
    finally:
        os.close(leader)
    assert text.index(b"\x1b[?1049h") < text.index(b"SANDBOX") < text.index(b"\x1b[?1049l")


HOSTILE = "guest \x1b[2J\x1b]0;owned\x07\x9b31m \u202egnp.exe\nvolume      forged \x7f"


@pytest.mark.parametrize(
    "words",
    [
        ["explain", "--volume", "vol-1"],
        ["describe", "vol-1"],
        ["describe", "vol-1", "-o", "json"],
        ["volumes", "-o", "wide"],
        ["volumes", "-o", "json"],
        ["volumes", "-o", "yaml"],
        ["status"],
        ["doctor"],
        ["end-orphan", "vol-1"],
        ["describe", HOSTILE],
        ["explain", "--target", HOSTILE],
        ["explain", HOSTILE],
    ],
    ids=lambda words: " ".join(words).partition("guest")[0],
)
async def test_hostile_text_is_escaped_on_every_output(node: FakeNode, words: list[str]) -> None:
    target = await published(node)
    path = volumes.TargetPath.parse(target)
    paths = layout.Layout(f"{node.places.run}/volumes").entry(path)
    with claims.ClaimLock.acquire(paths, path):
        claims.write(paths, replace(ORPHANED, sandbox_id=f"box{HOSTILE}", error=HOSTILE))
        output = (await crust(node, *words)).output
    assert [line for line in output.splitlines() if not line.isprintable()] == []
    assert not any(line.startswith("volume      forged") for line in output.splitlines())


SANDBOX = "sandbox-0001"
ORPHANED = claims.Claim(
    sandbox_id=SANDBOX,
    handler="kata",
    state=claims.State.ERROR,
    error="[SandboxOrphaned] sandbox sandbox-0001 is lost to its container engine",
    pid=0,
    claimed_at=datetime.datetime.now(datetime.UTC),
    live=True,
)


@dataclass
class _Machine:
    """A process with a volume, whose claim a keeper holds."""

    node: FakeNode
    process: subprocess.Popen[bytes]
    paths: layout.EntryPaths

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    async def crust(self, *words: str, answer: str = "") -> Result:
        return await invoked(*words, "--run-dir", self.node.places.run, answer=answer)

    async def end(self, *words: str, answer: str = "") -> Result:
        return await self.crust("end-orphan", "vol-1", *words, answer=answer)

    def write(self, claim: claims.Claim) -> None:
        """What its runtime writes; a test has no copy of the lock, and needs none to write the file."""
        claims.write(self.paths, claim)


@contextmanager
def _process(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    program = [sys.executable, "-c", "import sys; sys.stdin.read()", *arguments]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest_asyncio.fixture
async def machine(places: Places) -> AsyncIterator[_Machine]:
    async with FakeNode(places, driver=fake_driver.FakeDriver()) as node, node.handler():
        target = places.target("pod-1")
        await node.co.publish("vol-1", target)
        path = volumes.TargetPath.parse(target)
        paths = layout.Layout(f"{places.run}/volumes").entry(path)
        with ExitStack() as stack:
            process = stack.enter_context(_process())
            socket = Path(places.root) / "keeper.sock"
            with claims.ClaimLock.acquire(paths, path) as lock:
                claims.write(paths, replace(ORPHANED, pid=process.pid))
                with keepers.start(socket, process_of(process.pid)) as keeper:
                    keeper.hold("volume", [lock.fd])
                lock.close()
            yield _Machine(node, process, paths)


async def test_orphan_is_ended_and_its_volume_is_free(machine: _Machine) -> None:
    ended = await machine.end("--yes")
    assert ended.exit_code == 0, ended.output
    line = f"ended process {machine.process.pid}, sandbox {SANDBOX}: the volume vol-1 is free"
    assert line in ended.output
    assert not machine.lives
    assert not claims.is_held(machine.paths)


async def test_it_is_asked_before_and_no_ends_nothing(machine: _Machine) -> None:
    asked = await machine.end(answer="n\n")
    assert asked.exit_code == 1
    assert f"Process {machine.process.pid} (" in asked.output
    assert machine.lives
    assert (await machine.end(answer="y\n")).exit_code == 0
    assert not machine.lives


async def test_orphan_is_shown_with_its_process_and_what_to_do(machine: _Machine) -> None:
    wide = await machine.crust("volumes", "-o", "wide")
    assert str(machine.process.pid) in wide.output
    assert "[SandboxOrphaned]" in wide.output
    described = await machine.crust("describe", "vol-1")
    assert f"claimed by    process {machine.process.pid}" in described.output
    doctor = await machine.crust("doctor", "--check", "orphans")
    assert doctor.exit_code == 1
    assert "do: crust end-orphan vol-1" in doctor.output
    await machine.end("--yes")
    assert (await machine.crust("doctor", "--check", "orphans")).exit_code == 0


async def test_machine_that_its_runtime_knows_is_not_ended(machine: _Machine) -> None:
    for claim in (
        replace(ORPHANED, pid=machine.process.pid, state=claims.State.MOUNTED, error=""),
        replace(ORPHANED, pid=machine.process.pid, error="mount failed"),
    ):
        machine.write(claim)
        ended = await machine.end("--yes")
        assert ended.exit_code == 1
        assert "[NotOrphaned]" in ended.output
    assert machine.lives


async def test_process_that_claim_does_not_end_with_is_not_ended(machine: _Machine) -> None:
    with _process() as other:
        machine.write(replace(ORPHANED, pid=other.pid))
        ended = await machine.end("--yes")
        assert ended.exit_code == 1
        assert "no process that has it watches that process" in ended.output
        assert other.poll() is None
    assert machine.lives


async def test_sandbox_with_a_shim_is_not_ended(machine: _Machine) -> None:
    with a_shim(SANDBOX) as shim:
        ended = await machine.end("--yes")
        assert ended.exit_code == 1
        assert f"process {shim.pid} is a shim of that sandbox" in ended.output
    assert machine.lives


async def test_arguments_of_a_shim_alone_keep_no_machine(machine: _Machine) -> None:
    """Every user may write a sandbox's id among the arguments of a program."""
    with _process("-namespace", "k8s.io", "-id", SANDBOX):
        ended = await machine.end("--yes")
    assert ended.exit_code == 0, ended.output


async def test_volume_that_is_not_deferred_is_said_to_be_so(machine: _Machine) -> None:
    ended = await machine.crust("end-orphan", "vol-2", "--yes")
    assert ended.exit_code == 1
    assert "[VolumeNotDeferred]" in ended.output
