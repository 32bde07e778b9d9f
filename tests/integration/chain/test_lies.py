"""Each call by which a node's parts ask the kernel fails once, at every step of a volume's life: no answer is no
"no".

A step is one RPC of the CO, on a node whose parts are one process, with a real device. The call that fails is of a
file, a device or a process that the step concerns. The step succeeds or is refused with a code after which the CO
repeats it; the repeat without the failure succeeds. Beside a hidden writer, another process with the device open, a
step that gives the device away never succeeds.

Each call fails with one errno, and the calls take the list in turn; `make lies` gives each call each errno.
"""

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc.aio
import pytest

from crust.host.block import users
from crust.host.mounts import mountinfo
from crust.rpc import status
from crust.rpc.status import PeerStatus
from tests.support.co import capability
from tests.support.drivers import remnants
from tests.support.faults import lies
from tests.support.faults.lies import Concerns, Failure
from tests.support.faults.refusals import repeated
from tests.support.nodes.places import Places
from tests.support.nodes.served_node import ONE_PROCESS, BlockNode, started

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]


@dataclass(frozen=True, slots=True)
class OfNode(Concerns):
    """The files of a node, loop devices, mounts and processes."""

    def has(self, path: str) -> bool:
        """See `Concerns`. A call of the test itself, in its main thread, never fails."""
        if threading.current_thread() is threading.main_thread():
            return False
        return path.startswith(_DEVICES) or Concerns.has(self, path)


_DEVICES = (
    "/dev/loop",
    "/sys/block/loop",
    "/sys/class/block/loop",
    "/sys/devices/virtual/block/loop",
    "/sys/dev/block/",
)
_LISTS = frozenset(
    {"/proc", "/proc/partitions", "/proc/self/mountinfo", "/proc/self/ns/mnt", "/sys/block"}
)


@dataclass
class Life:
    """A volume on a node, and where it is published."""

    node: BlockNode
    volume_id: str
    target: str

    @property
    def device(self) -> str:
        (device,) = remnants.devices(self.node.places.root)
        return device.path

    async def stage(self) -> None:
        await self.node.stage(self.volume_id)

    async def unstage(self) -> None:
        await self.node.unstage(self.volume_id)

    async def defer(self) -> None:
        await self.node.publish(self.volume_id, self.target)

    async def mount(self) -> None:
        await self.node.publish(self.volume_id, self.target, defer=False)

    async def unpublish(self) -> None:
        await self.node.unpublish(self.volume_id, self.target)

    def left(self, step: "Step") -> list[str]:
        """What is on the node of the step's path."""
        if step.act is Life.stage:
            return [device.path for device in remnants.devices(self.node.places.root)]
        mounts = [mount.target for mount in mountinfo.below(self.target)]
        entries = [name for name in self.node.places.entries() if not name.startswith(".")]
        return [*entries, *mounts]


Act = Callable[[Life], Awaitable[None]]


@dataclass(frozen=True)
class Step:
    """An RPC; `before` leads to it from a volume that is not staged, `after` back to where it began."""

    act: Act
    before: tuple[Act, ...] = ()
    after: tuple[Act, ...] = ()
    forgets: bool = False
    """A CO that gets a final code forgets the volume at this path."""
    gives_away: bool = False
    """It gives the device to another kernel, or away: never beside a writer."""


STEPS = {
    "stage": Step(Life.stage, (), (Life.unstage,), forgets=True),
    "unstage": Step(Life.unstage, (Life.stage,), (Life.stage,)),
    "publish-deferred": Step(
        Life.defer, (Life.stage,), (Life.unpublish,), forgets=True, gives_away=True
    ),
    "publish-again": Step(Life.defer, (Life.stage, Life.defer), forgets=True),
    "publish-host": Step(
        Life.mount,
        (Life.stage, Life.defer, Life.unpublish),
        (Life.unpublish,),
        forgets=True,
        gives_away=True,
    ),
    "unpublish-deferred": Step(
        Life.unpublish, (Life.stage, Life.defer), (Life.defer,), gives_away=True
    ),
    "unpublish-host": Step(Life.unpublish, (Life.stage, Life.mount), (Life.mount,)),
}


@pytest.fixture
async def life(places: Places) -> AsyncIterator[Life]:
    async with started(BlockNode(places, parts=ONE_PROCESS)) as node:
        volume_id = (await node.co.create("pvc", capability())).volume_id
        node.created[volume_id] = None
        yield Life(node, volume_id, places.target("one"))


async def _lied(
    life: Life, step: Step, pid: int
) -> AsyncIterator[tuple[Failure, grpc.aio.AioRpcError | None]]:
    """Take the step with each failure; after each the caller has it repeated."""
    first = [*STEPS.values()].index(step)
    errnos = lies.all_errnos if os.environ.get("TESTS_LIES") == "all" else lies.in_turn(first)
    concerns = OfNode(_LISTS, (life.node.places.root, f"/proc/{pid}"))
    for number in itertools.count():
        for each in errnos(number):
            failure, error = Failure(number, each), None
            with lies.failing(concerns, failure):
                try:
                    await step.act(life)
                except grpc.aio.AioRpcError as refused:
                    error = refused
            if not failure.call:
                return
            yield failure, error


@contextmanager
def _writer(device: str) -> Iterator[int]:
    """Another process, which has the device open as a virtual machine has."""
    code = "import os, sys; held = os.open(sys.argv[1], os.O_RDWR); print('ok', flush=True); sys.stdin.read()"
    argv, pipe = [sys.executable, "-c", code, device], subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ok\n"
        yield process.pid
        process.communicate()


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
async def test_failed_call_at_a_step_is_no_answer(step: Step, life: Life) -> None:
    for act in step.before:
        await act(life)
    wrong = []
    async for failure, error in _lied(life, step, os.getpid()):
        if error is not None and step.forgets and _is_final(error):
            left = life.left(step)
            wrong += [f"{failure}: {error.details()} and {left} is left"] if left else []
        try:
            await repeated(lambda: step.act(life), grpc.StatusCode.ABORTED)
        except grpc.aio.AioRpcError as again:
            wrong.append(f"{failure}: {error and error.details()}; again: {again.details()}")
            await repeated(lambda: step.act(life), *_NOT_FINAL)
        for act in step.after:
            await act(life)
    for act in step.after:
        await act(life)
    await life.node.restart("node")  # it removes what a failed removal has left
    assert wrong == []


@pytest.mark.parametrize(
    "step", [pytest.param(step, id=id_) for id_, step in STEPS.items() if step.gives_away]
)
async def test_failed_call_at_a_step_hides_no_writer(
    step: Step, life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(users, "_PAUSES_S", (0.0,))  # this writer does not leave
    for act in step.before:
        await act(life)
    with _writer(life.device) as pid:
        wrong = [
            str(failure)
            async for failure, error in _lied(life, step, pid)
            if error is None or (step.forgets and _is_final(error) and life.left(step))
        ]
        with pytest.raises(grpc.aio.AioRpcError):
            await step.act(life)
    await repeated(lambda: step.act(life), *_NOT_FINAL)
    for act in step.after:
        await act(life)
    await life.node.restart("node")
    assert wrong == []


_NOT_FINAL = (grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE)


def _is_final(error: grpc.aio.AioRpcError) -> bool:
    return status.is_final(PeerStatus(error.code(), ""))
