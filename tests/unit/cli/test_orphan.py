"""Orphans, and `crust end-orphan`."""

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest_asyncio
from click.testing import Result

from crust.core import volumes
from crust.handoff import claims, layout
from crust.runtime_handler.blocking import keepers, process_of
from tests.support.drivers import fake_driver
from tests.support.kata.orphan import ORPHANED, SANDBOX
from tests.support.kata.sandbox import a_shim
from tests.support.nodes.commands import invoked
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places


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
        assert f"process {shim.pid} is Kata's shim for that sandbox" in ended.output
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
