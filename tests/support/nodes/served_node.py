"""A node on the real kernel: proxy and shim around a driver, a runtime handler without virtual machines, and its CO.

The driver is a subclass's. What a test leaves created, staged or published is ended by the CO when the test has
passed, and nothing may be on the node then. As a kubelet, the CO does not end what a final status has refused.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import grpc.aio

from crust.blockdriver import serve
from crust.core import volumes
from crust.core.settings.driver import DriverSettings
from crust.core.settings.program import ProgramSettings
from crust.core.settings.proxy import KubernetesSettings
from crust.csi_shim.wrap.node_shim import Wrapping
from crust.handoff import store
from crust.handoff.entry import Entry
from crust.handoff.record import Record
from crust.host.mounts import mountinfo
from crust.node import node_process
from crust.node.settings import NodeSettings
from crust.proxy import proxy_process
from crust.rpc import channel, status
from crust.rpc.status import PeerStatus
from crust.runtime_handler import claim_volume
from crust.wire.csi.v1 import csi_pb2_grpc
from tests.support.co import MODE, Co, capability
from tests.support.drivers import remnants
from tests.support.nodes import node as nodes
from tests.support.nodes.node import Places
from tests.support.runtimes.fake_handler import FakeHandler, running

Node = TypeVar("Node", bound="ServedNode")
Answer = TypeVar("Answer")


@dataclass
class ServedNode:
    """The processes of a node, all in this one."""

    places: Places
    is_one_process: bool = field(default=False, kw_only=True)
    """Whether proxy, shim and driver are `crust node`: then the shim cannot end alone."""
    kubernetes: KubernetesSettings | None = field(default=None, kw_only=True)
    grace_s: float = field(default=10, kw_only=True)
    """How long the proxy waits for a runtime handler after its start."""
    daemons: AsyncExitStack = field(default_factory=AsyncExitStack, init=False)
    shim: AsyncExitStack = field(default_factory=AsyncExitStack, init=False)
    connected: grpc.aio.Channel = field(init=False)
    created: dict[str, None] = field(default_factory=dict, init=False)
    staged: dict[tuple[str, str], None] = field(default_factory=dict, init=False)
    published: dict[str, str] = field(default_factory=dict, init=False)
    """What the CO has to end: volumes, volume and staging path of each stage, the volume of each target."""

    served: ClassVar[str] = "block.csi.crust.dev"

    @property
    def driver_name(self) -> str:
        """The name by which the proxy serves the driver."""
        return self.served

    @property
    def wrapping(self) -> Wrapping | None:
        """How the shim wraps the driver; None: it does not."""
        return None

    def tables(self) -> dict[str, Any]:
        """The tables of `crust node` beside `[proxy]`."""
        raise NotImplementedError

    async def start_driver(self) -> None:
        """Start what serves the driver's socket, where it is no part of `crust node`."""

    def handler(self) -> Any:
        """A runtime handler, registered while the block runs."""
        handlers = self.places.sockets.handlers
        return running(FakeHandler(), proxy_socket=handlers, endpoint=self.places.handler)

    async def start(self) -> None:
        """Start everything, bottom up, as after the start of the node."""
        enter = self.daemons.enter_async_context
        if self.is_one_process:
            await enter(node_process.running(self.node_settings()))
        else:
            await self.start_driver()
            await enter(proxy_process.running(self._proxy()))
            await self.start_shim()
        await enter(self.handler())
        self.connected = await enter(channel.connect(self.places.csi))

    def _proxy(self) -> Any:
        return self.places.settings(
            grace_s=self.grace_s, driver=self.driver_name, kubernetes=self.kubernetes
        )

    def node_settings(self, **process: Any) -> NodeSettings:
        """The settings of one process with all parts."""
        proxy = self._proxy().model_dump(exclude=set(ProgramSettings.model_fields))
        return NodeSettings.model_validate({"proxy": proxy, **self.tables(), **process})

    async def start_shim(self) -> None:
        """Start the shim alone, with nothing in its memory."""
        await self.shim.enter_async_context(nodes.shim(self.places, wrapping=self.wrapping))

    async def stop_shim(self) -> None:
        """End it, and what it has in memory."""
        await self.shim.aclose()
        self.shim = AsyncExitStack()

    async def restart_shim(self) -> None:
        """It forgets what it had in memory."""
        await self.stop_shim()
        await self.start_shim()

    async def stop(self) -> None:
        await self.stop_shim()
        await self.daemons.aclose()
        self.daemons = AsyncExitStack()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    @property
    def co(self) -> Co:
        """The calls of the proxy's socket."""
        return Co(self.connected)

    @property
    def node(self) -> "csi_pb2_grpc.NodeAsyncStub":
        """The Node service, as a kubelet calls it."""
        return csi_pb2_grpc.NodeStub(self.connected)

    @property
    def controller(self) -> "csi_pb2_grpc.ControllerAsyncStub":
        return csi_pb2_grpc.ControllerStub(self.connected)

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
        assert [each for each in targets if os.path.lexists(each)] == []
        for volume_id in list(self.created):
            await self.delete_volume(volume_id)
        self.check_clean()

    def check_clean(self) -> None:
        """Check that the node has no entry, no mount and no device of a volume."""
        assert self.places.entries() == []
        assert mountinfo.below(self.places.kubelet) == ()
        assert remnants.devices(self.places.root) == []

    def entry(self, target: str) -> Entry | None:
        return store.Store(self.places.volumes).read(volumes.TargetPath(target))

    def record(self, target: str) -> Record:
        """The record of a target, which has one."""
        entry = self.entry(target)
        assert entry is not None
        return entry.require()

    def sandbox(self, target: str, name: str = "box-1") -> AbstractContextManager[str]:
        """A sandbox that has the volume; yields the device."""
        return sandbox(self.places, target, name)


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

    async def start_driver(self, socket: str = "") -> None:
        """Serve the driver, at its own socket if none is given."""
        proxy = {"runtime_socket": self.places.sockets.runtime}
        settings = DriverSettings.model_validate(self.tables()["driver"] | proxy)
        serving = serve.running(
            serve.driver_of(settings), socket=socket or settings.socket, run_dir=settings.run_dir
        )
        await self.daemons.enter_async_context(serving)

    async def volume(self, name: str = "pvc", *, mode: int = MODE.SINGLE_NODE_MULTI_WRITER) -> str:
        """A new ext4 volume, staged at its first staging path; its id."""
        volume_id = (await self.co.create(name, capability(mode=mode))).volume_id
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
        context: dict[str, str] = nodes.NAMED,
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
def sandbox(places: Places, target: str, name: str = "box-1") -> Iterator[str]:
    """A sandbox that has the volume: it holds lock and device as a VM does. Yields the device."""
    claim = claim_volume(
        places.volumes,
        volumes.TargetPath(target),
        volumes.SandboxId(name),
        volumes.HandlerName("kata"),
        features=frozenset(volumes.HandlerFeature),
    )
    with claim:
        yield claim.record.device


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
async def started(node: Node) -> AsyncIterator[Node]:
    """The node while the block runs. Everything below its root goes at the end, also after a failed test."""
    await node.start()
    try:
        yield node
        await node.take_down()
    finally:
        await node.stop()
        await asyncio.to_thread(remnants.remove, node.places.root)
