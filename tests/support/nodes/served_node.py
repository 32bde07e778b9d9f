"""A node on the real kernel, with a runtime handler without virtual machines, and its CO.

The CO ends what a test has left created, staged or published, when the test has passed, and nothing may be on the
node then. As a kubelet, the CO does not end what a final status has refused.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc.aio

from crust.blockdriver import serve
from crust.blockdriver.settings import DriverSettings
from crust.core.settings.program import ProgramSettings
from crust.host.mounts import mountinfo
from crust.node import node_process
from crust.node.settings import NodeSettings
from crust.rpc import status
from crust.rpc.status import PeerStatus
from tests.support.co import MODE, NAMED, capability
from tests.support.drivers import remnants
from tests.support.nodes.node import Node

ONE_PROCESS = ("node", "handler", "calls")
"""The parts of a node whose driver, proxy and shim are `crust node`: then the shim cannot end alone."""
Started = TypeVar("Started", bound="ServedNode")
Answer = TypeVar("Answer")


@dataclass
class ServedNode(Node):
    """A node, and what its CO has to end."""

    grace_s: float = field(default=10, kw_only=True)
    created: dict[str, None] = field(default_factory=dict, init=False)
    staged: dict[tuple[str, str], None] = field(default_factory=dict, init=False)
    published: dict[str, str] = field(default_factory=dict, init=False)
    """What the CO has to end: volumes, volume and staging path of each stage, the volume of each target."""

    def part(self, name: str) -> AbstractAsyncContextManager[Any]:
        if name == "node":
            return node_process.running(self.node_settings())
        return super().part(name)

    def tables(self) -> dict[str, Any]:
        """The tables of `crust node` beside `[proxy]`."""
        raise NotImplementedError

    def node_settings(self, **process: Any) -> NodeSettings:
        """The settings of one process with all parts."""
        proxy = self.proxy_settings().model_dump(exclude=set(ProgramSettings.model_fields))
        return NodeSettings.model_validate({"proxy": proxy, **self.tables(), **process})

    async def note_stage(self, volume_id: str, staging: str, call: Awaitable[Answer]) -> Answer:
        """Await a NodeStageVolume, and remember what may be staged then."""
        with _unless_final(self.staged, (volume_id, staging), None):
            return await call

    async def note_publish(self, volume_id: str, target: str, call: Awaitable[Answer]) -> Answer:
        """Await a NodePublishVolume, and remember what may be published then."""
        with _unless_final(self.published, target, volume_id):
            return await call

    async def end_publish(self, volume_id: str, target: str, **fields: Any) -> None:
        await self.co.unpublish(volume_id, target, **fields)
        self.published.pop(target, None)

    async def end_stage(self, volume_id: str, staging: str) -> None:
        await self.co.unstage(volume_id, staging)
        self.staged.pop((volume_id, staging), None)

    async def delete_volume(self, volume_id: str) -> None:
        await self.co.delete(volume_id)
        self.created.pop(volume_id, None)

    async def take_down(self) -> None:
        """End what the test has left, and check that nothing of it is on the node."""
        targets = list(self.published)
        for target in targets:
            await self.end_publish(self.published[target], target)
        for volume_id, staging in list(self.staged):
            await self.end_stage(volume_id, staging)
        assert [target for target in targets if os.path.lexists(target)] == []
        for volume_id in list(self.created):
            await self.delete_volume(volume_id)
        self.check_clean()

    def check_clean(self) -> None:
        """Check that the node has no entry, no mount and no device of a volume."""
        assert self.places.entries() == [], self.places.entries()
        assert mountinfo.below(self.places.kubelet) == ()
        assert remnants.devices(self.places.root) == []


@dataclass
class BlockNode(ServedNode):
    """A node with our driver, and a CO that calls it."""

    def tables(self) -> dict[str, Any]:
        root = self.places.root
        driver = {
            "socket": self.places.driver,
            "run_dir": f"{root}/driver-run",
            "state_dir": f"{root}/state",
            "create_pool": True,
            "node_id": "node-1",
            "target_roots": [self.places.kubelet],
        }
        shim = {"socket": self.places.shim, "kubelet_root": self.places.kubelet}
        return {"shim": shim, "driver": driver}

    def part(self, name: str) -> AbstractAsyncContextManager[Any]:
        return self.driver(self.places.driver) if name == "driver" else super().part(name)

    def driver(self, socket: str) -> AbstractAsyncContextManager[Any]:
        """The driver at a socket, while the block runs."""
        proxy = {"runtime_socket": self.places.sockets.runtime}
        settings = DriverSettings.model_validate(self.tables()["driver"] | proxy)
        return serve.running(serve.driver_of(settings), socket=socket, run_dir=settings.run_dir)

    async def volume(
        self, name: str = "pvc", *, mode: int = MODE.SINGLE_NODE_MULTI_WRITER, **fields: Any
    ) -> str:
        """A new ext4 volume, staged at its first staging path; its id."""
        volume_id = (await self.co.create(name, capability(mode=mode), **fields)).volume_id
        self.created[volume_id] = None
        await self.stage(volume_id, mode=mode)
        return volume_id

    def staging(self, name: str = "global") -> str:
        path = f"{self.places.kubelet}/{name}"
        os.makedirs(path, exist_ok=True)
        return path

    async def stage(
        self,
        volume_id: str,
        name: str = "global",
        *,
        mode: int = MODE.SINGLE_NODE_MULTI_WRITER,
        **fields: Any,
    ) -> None:
        call = self.co.stage(volume_id, self.staging(name), capability(mode=mode), **fields)
        await self.note_stage(volume_id, self.staging(name), call)

    async def unstage(self, volume_id: str, name: str = "global") -> None:
        await self.end_stage(volume_id, self.staging(name))

    async def publish(
        self,
        volume_id: str,
        target: str,
        *,
        mode: int = MODE.SINGLE_NODE_MULTI_WRITER,
        context: dict[str, str] = NAMED,
        **fields: Any,
    ) -> None:
        """NodePublishVolume, deferred by the CO's flag."""
        call = self.co.publish(
            volume_id,
            target,
            capability(mode=mode),
            staging=self.staging(),
            volume_context=context,
            **fields,
        )
        await self.note_publish(volume_id, target, call)

    async def unpublish(self, volume_id: str, target: str, **fields: Any) -> None:
        await self.end_publish(volume_id, target, **fields)

    async def published_volume(self) -> tuple[str, str]:
        """A new volume, staged and deferred: its id, and its target."""
        volume_id, target = await self.volume(), self.places.target("one")
        await self.publish(volume_id, target)
        return volume_id, target


@contextmanager
def _unless_final(kept: dict[Any, Any], key: object, value: object) -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if not status.is_final(PeerStatus(error.code(), "")):
            kept[key] = value
        raise
    kept[key] = value


@asynccontextmanager
async def started(node: Started) -> AsyncIterator[Started]:
    """The node while the block runs. Everything below its root goes at the end, also after a failed test."""
    try:
        async with node:
            yield node
            await node.take_down()
    finally:
        await asyncio.to_thread(remnants.remove, node.places.root)
