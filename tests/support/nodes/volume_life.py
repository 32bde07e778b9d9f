"""The life of a volume on a node as steps, each one RPC of the CO, that a test takes while something fails."""

import asyncio
import os
import subprocess
import sys
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc.aio

from crust.core import errors, volumes
from crust.host.mounts import mount_api, mountinfo
from crust.rpc import status
from crust.rpc.status import PeerStatus
from crust.runtime_handler.blocking import claim, process_of, take_claim
from tests.support.co import MIB, capability
from tests.support.drivers import remnants
from tests.support.faults.refusals import repeated
from tests.support.nodes.served_node import BlockNode, ServedNode

NodeT = TypeVar("NodeT", bound=ServedNode)


@dataclass
class Scene(Generic[NodeT]):
    """A volume's target on a node, and what is seen there."""

    node: NodeT
    volume_id: str
    target: str
    claimed: claim.Claim | None = None
    others: int = 0
    """A number for the next other volume, snapshot or size."""

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

    async def next(self) -> None:
        self.others += 1


@dataclass
class Life(Scene[BlockNode]):
    """A volume of our driver, from its creation to its deletion, and another one."""

    other_id: str = ""

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

    async def create(self) -> None:
        """Another volume."""
        self.other_id = (await self.node.co.create(f"other-{self.others}", capability())).volume_id

    async def delete(self) -> None:
        await self.node.co.delete(self.other_id)

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

    def others_images(self) -> list[str]:
        return [name for name in self.images() if name != self.volume_id]

    def has_other(self) -> bool:
        return len(self.others_images()) == 1


LifeT = TypeVar("LifeT", bound=Scene[Any], contravariant=True)
Act = Callable[[LifeT], Awaitable[None]]


@dataclass(frozen=True)
class Step(Generic[LifeT]):
    """An RPC; `before` leads to it from a volume that is not staged, `after` back to where it began."""

    act: Act[LifeT]
    before: tuple[Act[LifeT], ...] = ()
    after: tuple[Act[LifeT], ...] = ()
    is_done: Callable[[LifeT], bool] = lambda _: True
    """What its OK promises."""
    left: Callable[[LifeT], Sequence[object]] = lambda _: ()
    """What is left of it. A CO forgets the volume after a final code, where this may hold something."""
    gives_away: bool = False
    """It gives the device to another kernel, or away: never beside a writer."""


STEPS: Mapping[str, Step[Life]] = {
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
        Life.create, after=(Life.delete, Life.next), is_done=Life.has_other, left=Life.others_images
    ),
    "delete": Step(
        Life.delete,
        (Life.create,),
        (Life.next, Life.create),
        is_done=lambda life: not life.has_other(),
    ),
    "clone": Step(
        Life.copy, after=(Life.delete, Life.next), is_done=Life.has_other, left=Life.others_images
    ),
    "grow": Step(
        Life.grow, after=(Life.next,), is_done=lambda life: life.size_mib() == 65 + life.others
    ),
}
Refused = grpc.aio.AioRpcError | errors.CrustError
"""How a step is refused."""

NOT_FINAL = (grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE)


async def refused(step: Step[LifeT], life: LifeT, *while_so: grpc.StatusCode) -> Refused | None:
    """The refusal of the step, once no earlier call of it runs any more, and with none of these codes."""
    try:
        await repeated(lambda: step.act(life), grpc.StatusCode.ABORTED, *while_so)
    except (grpc.aio.AioRpcError, errors.CrustError) as refused:
        return refused
    return None


@contextmanager
def writer(device: str) -> Iterator[int]:
    """Another process, which has the device open as a virtual machine has."""
    code = "import os, sys; held = os.open(sys.argv[1], os.O_RDWR); print('ok', flush=True); sys.stdin.read()"
    argv, pipe = [sys.executable, "-c", code, device], subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ok\n"
        yield process.pid
        process.communicate()


def is_final(refused: Refused) -> bool:
    if isinstance(refused, grpc.aio.AioRpcError):
        return status.is_final(PeerStatus(refused.code(), ""))
    return status.is_final(PeerStatus.of(refused))


def text_of(refused: Refused) -> str:
    return (refused.details() or "") if isinstance(refused, grpc.aio.AioRpcError) else str(refused)


async def take(acts: Iterable[Act[LifeT]], life: LifeT, *while_so: grpc.StatusCode) -> None:
    """Take these steps, each of them again while it is refused with one of these codes."""
    for act in acts:
        await repeated(partial(act, life), *while_so)


async def wrong_answers(
    step: Step[LifeT],
    life: LifeT,
    lied: AsyncIterator[tuple[object, Refused | None]],
    *while_so: grpc.StatusCode,
) -> list[str]:
    """What is wrong with the answers of a step that is taken with each lie of `lied`, and again without it.

    A CO repeats what is refused with one of these codes, until a peer is there again.
    """

    await take(step.before, life, *while_so)
    wrong = []
    async for lie, refusal in lied:
        if refusal is None:
            wrong += [] if step.is_done(life) else [f"{lie}: OK, and it is not so"]
        elif is_final(refusal) and (left := step.left(life)):
            wrong.append(f"{lie}: {text_of(refusal)}, and {left} is left")
        again = await refused(step, life, *while_so)
        if again is not None:
            wrong.append(f"{lie}: {refusal and text_of(refusal)}; again: {text_of(again)}")
            await repeated(lambda: step.act(life), *NOT_FINAL)
        assert step.is_done(life), lie
        await take(step.after, life, *while_so)
    await take(step.after, life, *while_so)
    return wrong
