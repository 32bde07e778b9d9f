"""Each call by which a node's parts ask the kernel fails once, at every step of a volume's life: no answer is no
"no".

A step is one RPC of the CO, on a node whose parts are one process, with a real device. The call that fails is of a
file, a device or a process that the step concerns. The step succeeds or is refused with a code after which the CO
repeats it; the repeat without the failure succeeds. Beside a hidden writer, another process with the device open, a
step that gives the device away never succeeds.

Each call fails with one errno, and the calls take the list in turn; `make lies` gives each call each errno.
"""

import asyncio
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest

from crust.core import errors, volumes
from crust.host.block import users
from crust.host.mounts import mount_api, mountinfo
from crust.rpc import status
from crust.rpc.status import PeerStatus
from crust.runtime_handler import claim, process_of, take_claim
from tests.support.co import MIB, capability
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
    """A volume on a node, where it is published, and what a sandbox and the CO have of it."""

    node: BlockNode
    volume_id: str
    target: str
    claimed: claim.Claim | None = None
    others: int = 0
    """A number for the next other volume, snapshot or size."""
    other_id: str = ""

    @property
    def device(self) -> str:
        (device,) = self.devices
        return device

    @property
    def devices(self) -> list[str]:
        return [device.path for device in remnants.devices(self.node.places.root)]

    @property
    def mounts(self) -> list[str]:
        """The filesystems at the target; a guard is "guard"."""
        found = mountinfo.stacked_at(self.target)
        return ["guard" if mount_api.is_guard(mount) else mount.fs_type for mount in found]

    @property
    def entries(self) -> list[str]:
        """The visible names of the handoff directory."""
        return [name for name in self.node.places.entries() if not name.startswith(".")]

    @property
    def published(self) -> list[str]:
        return [*self.entries, *self.mounts]

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

    async def claim(self) -> None:
        """A sandbox of this process claims the volume, once more."""
        await self.release()
        self.claimed = await asyncio.to_thread(
            take_claim.claim_volume,
            self.node.places.volumes,
            volumes.TargetPath.parse(self.target),
            volumes.SandboxId("sandbox-1"),
            volumes.HandlerName("kata"),
            features=[*volumes.HandlerFeature],
            process=process_of(os.getpid()),
        )

    async def release(self) -> None:
        if self.claimed is not None:
            self.claimed.release()
        self.claimed = None

    async def create(self) -> None:
        """Another volume."""
        self.other_id = (await self.node.co.create(f"other-{self.others}", capability())).volume_id

    async def delete(self) -> None:
        await self.node.co.delete(self.other_id)

    async def next(self) -> None:
        self.others += 1

    async def copy(self) -> None:
        """A clone of the volume, as another one."""
        made = await self.node.co.create(
            f"other-{self.others}", capability(), volume=self.volume_id
        )
        self.other_id = made.volume_id

    async def grow(self) -> None:
        """At the controller, one MiB at a time."""
        await self.node.co.grow(self.volume_id, (65 + self.others) * MIB)

    def size_mib(self) -> int:
        (image,) = Path(self.node.places.root, "state/volumes").glob(f"{self.volume_id}/*.img")
        return image.stat().st_size // MIB

    def images(self) -> list[str]:
        """The directories of the pool's volumes."""
        return [
            name
            for name in os.listdir(f"{self.node.places.root}/state/volumes")
            if not name.startswith(".")
        ]


Act = Callable[[Life], Awaitable[None]]


@dataclass(frozen=True)
class Step:
    """An RPC; `before` leads to it from a volume that is not staged, `after` back to where it began."""

    act: Act
    before: tuple[Act, ...] = ()
    after: tuple[Act, ...] = ()
    is_done: Callable[[Life], bool] = lambda _: True
    """What its OK promises."""
    left: Callable[[Life], Sequence[object]] = lambda _: ()
    """What is left of it. A CO forgets the volume after a final code, where this may hold something."""
    gives_away: bool = False
    """It gives the device to another kernel, or away: never beside a writer."""


STEPS = {
    "stage": Step(
        Life.stage,
        after=(Life.unstage,),
        is_done=lambda life: len(life.devices) == 1,
        left=lambda life: life.devices,
    ),
    "unstage": Step(
        Life.unstage, (Life.stage,), (Life.stage,), is_done=lambda life: life.devices == []
    ),
    "publish-deferred": Step(
        Life.defer,
        (Life.stage,),
        (Life.unpublish,),
        is_done=lambda life: len(life.entries) == 1 and life.mounts == ["guard"],
        left=lambda life: life.published,
        gives_away=True,
    ),
    "publish-again": Step(
        Life.defer,
        (Life.stage, Life.defer),
        is_done=lambda life: len(life.entries) == 1 and life.mounts == ["guard"],
        left=lambda life: life.published,
    ),
    "publish-host": Step(
        Life.mount,
        (Life.stage, Life.defer, Life.unpublish),
        (Life.unpublish,),
        is_done=lambda life: life.published == ["ext4"],
        left=lambda life: life.published,
        gives_away=True,
    ),
    "unpublish-deferred": Step(
        Life.unpublish,
        (Life.stage, Life.defer),
        (Life.defer,),
        is_done=lambda life: life.published == [],
        gives_away=True,
    ),
    "unpublish-host": Step(
        Life.unpublish,
        (Life.stage, Life.mount),
        (Life.mount,),
        is_done=lambda life: life.published == [],
    ),
    "claim": Step(
        Life.claim,
        (Life.stage, Life.defer),
        (Life.release,),
        is_done=lambda life: life.claimed is not None and len(life.claimed.fds) == 2,
        gives_away=True,
    ),
    "create": Step(
        Life.create, after=(Life.delete, Life.next), is_done=lambda life: len(life.images()) == 2
    ),
    "delete": Step(
        Life.delete,
        (Life.create,),
        (Life.next, Life.create),
        is_done=lambda life: len(life.images()) == 1,
    ),
    "clone": Step(
        Life.copy, after=(Life.delete, Life.next), is_done=lambda life: len(life.images()) == 2
    ),
    "grow": Step(
        Life.grow, after=(Life.next,), is_done=lambda life: life.size_mib() == 65 + life.others
    ),
}
Refused = grpc.aio.AioRpcError | errors.CrustError


@pytest.fixture
async def life(places: Places) -> AsyncIterator[Life]:
    async with started(BlockNode(places, parts=ONE_PROCESS)) as node:
        volume_id = (await node.co.create("pvc", capability())).volume_id
        node.created[volume_id] = None
        yield Life(node, volume_id, places.target("one"))


async def _lied(life: Life, step: Step, pid: int) -> AsyncIterator[tuple[Failure, Refused | None]]:
    """Take the step with each failure; after each the caller has it repeated."""
    first = [*STEPS.values()].index(step)
    errnos = lies.all_errnos if os.environ.get("TESTS_LIES") == "all" else lies.in_turn(first)
    concerns = OfNode(_LISTS, (life.node.places.root, f"/proc/{pid}"))
    for number in itertools.count():
        for each in errnos(number):
            failure = Failure(number, each)
            with lies.failing(concerns, failure):
                refused = await _refused(step, life)
            if not failure.call:
                return
            yield failure, refused


async def _refused(step: Step, life: Life) -> Refused | None:
    """The refusal of the step, once no earlier call of it runs any more."""
    try:
        await repeated(lambda: step.act(life), grpc.StatusCode.ABORTED)
    except (grpc.aio.AioRpcError, errors.CrustError) as refused:
        return refused
    return None


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
    async for failure, refused in _lied(life, step, os.getpid()):
        if refused is None:
            wrong += [] if step.is_done(life) else [f"{failure}: OK, and it is not so"]
        elif _is_final(refused) and (left := step.left(life)):
            wrong.append(f"{failure}: {_text(refused)}, and {left} is left")
        again = await _refused(step, life)
        if again is not None:
            wrong.append(f"{failure}: {refused and _text(refused)}; again: {_text(again)}")
            await repeated(lambda: step.act(life), *_NOT_FINAL)
        assert step.is_done(life), failure
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
            async for failure, refused in _lied(life, step, pid)
            if refused is None or (_is_final(refused) and step.left(life))
        ]
        assert await _refused(step, life) is not None
    await repeated(lambda: step.act(life), *_NOT_FINAL)
    for act in step.after:
        await act(life)
    await life.node.restart("node")
    assert wrong == []


_NOT_FINAL = (grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE)


def _is_final(refused: Refused) -> bool:
    if isinstance(refused, grpc.aio.AioRpcError):
        return status.is_final(PeerStatus(refused.code(), ""))
    return status.is_final(PeerStatus.of(refused))


def _text(refused: Refused) -> str:
    return (refused.details() or "") if isinstance(refused, grpc.aio.AioRpcError) else str(refused)
