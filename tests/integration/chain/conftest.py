"""Proxy, shim and block driver in one process on the real kernel, and a sandbox without a virtual machine."""

import asyncio
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from crust.blockdriver import app as driver_app
from crust.blockdriver import serve
from crust.blockdriver.services.roles import Role
from crust.core import volumes
from crust.core.settings.program import ProgramSettings
from crust.core.settings.proxy import KubernetesSettings
from crust.handoff import store
from crust.host.block import devices, loop, loop_devices
from crust.host.mounts import mount_api, mountinfo
from crust.node import process as node_process
from crust.node.settings import NodeSettings
from crust.proxy import app as proxy_app
from crust.proxy import guard
from crust.rpc import channel
from crust.runtime_handler import claim_volume
from tests.support.co import MIB, MODE, Co, capability
from tests.support.nodes import node as nodes
from tests.support.nodes.node import Places
from tests.support.runtimes.fake_handler import FakeHandler, running


@dataclass
class Chain:
    """A node's daemons, and a CO that calls them."""

    places: Places
    way: str = "processes"
    """As a process for each part, or as `crust node`."""

    kubernetes: KubernetesSettings | None = None
    """The proxy's access to the Kubernetes API, where each part is a process."""

    role: Role = field(default_factory=Role)
    """Of the driver, where each part is a process."""

    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    connected: grpc.aio.Channel = field(init=False)

    async def start(self) -> None:
        """Everything, bottom up, as after a restart of all daemons."""
        await (self._start_node() if self.way == "node" else self._start_parts())
        enter = self.stack.enter_async_context
        handlers = self.places.sockets.handlers
        await enter(running(FakeHandler(), proxy_socket=handlers, endpoint=self.places.handler))
        self.connected = await enter(channel.connect(self.places.csi))

    async def _start_node(self) -> None:
        await self.stack.enter_async_context(node_process.running(self.node_settings()))

    def node_settings(self, **process: Any) -> NodeSettings:
        """The settings of one process with all parts."""
        root = self.places.root
        proxy = self.places.settings(grace_s=10, driver="block.csi.crust.dev")
        own = set(ProgramSettings.model_fields)
        driver = {
            "socket": self.places.driver,
            "run_dir": f"{root}/driver-run",
            "state_dir": f"{root}/state",
            "create_pool": True,
            "node_id": "node-1",
            "target_roots": [self.places.kubelet],
        }
        return NodeSettings.model_validate(
            {
                "proxy": proxy.model_dump(exclude=own),
                "shim": {"socket": self.places.shim, "kubelet_root": self.places.kubelet},
                "driver": driver,
                **process,
            }
        )

    async def _start_parts(self) -> None:
        root = self.places.root
        built = driver_app.build(
            create_pool=True,
            state_dir=f"{root}/state",
            run_dir=f"{root}/driver-run",
            node_id="node-1",
            target_roots=(self.places.kubelet,),
            role=self.role,
        )
        enter = self.stack.enter_async_context
        await enter(
            serve.running(
                built,
                socket=self.places.driver,
                run_dir=f"{root}/driver-run",
            )
        )
        await enter(
            proxy_app.running(
                self.places.settings(
                    grace_s=10, driver="block.csi.crust.dev", kubernetes=self.kubernetes
                ),
                targets=guard.GuardedTargets([self.places.kubelet]),
                devices=devices,
            )
        )
        await enter(nodes.shim(self.places))

    async def restart(self) -> None:
        """All daemons stop and start."""
        await self.stack.aclose()
        await self.start()

    @property
    def co(self) -> Co:
        """Publish, unpublish."""
        return Co(self.connected)

    async def volume(self, *, mode: int = MODE.SINGLE_NODE_MULTI_WRITER) -> str:
        """A new ext4 volume, staged at its first staging path; its id."""
        volume_id = (await self.co.create("pvc", capability(mode=mode))).volume_id
        await self.stage(volume_id, mode=mode)
        return volume_id

    def staging(self, name: str = "global") -> str:
        """A staging path that exists."""
        path = f"{self.places.kubelet}/{name}"
        os.makedirs(path, exist_ok=True)
        return path

    async def stage(
        self, volume_id: str, name: str = "global", *, mode: int = MODE.SINGLE_NODE_MULTI_WRITER
    ) -> None:
        """NodeStageVolume."""
        await self.co.stage(volume_id, self.staging(name), capability(mode=mode))

    async def unstage(self, volume_id: str, name: str = "global") -> None:
        """NodeUnstageVolume."""
        await self.co.unstage(volume_id, self.staging(name))

    async def publish(
        self,
        volume_id: str,
        target: str,
        *,
        defer: bool = True,
        readonly: bool = False,
        mode: int = MODE.SINGLE_NODE_MULTI_WRITER,
    ) -> None:
        """NodePublishVolume."""
        await self.co.publish(
            volume_id,
            target,
            capability(mode=mode),
            defer=defer,
            readonly=readonly,
            staging=self.staging(),
            volume_context=nodes.NAMED,
        )

    def entry(self, target: str) -> store.Entry | None:
        """The handoff's entry."""
        return store.Store(self.places.volumes).read(volumes.TargetPath(target))

    @contextmanager
    def sandbox(self, target: str, name: str = "box-1") -> Iterator[str]:
        """A sandbox that has the volume: it holds lock and device as a VM does. Yields the device."""
        claim = claim_volume(
            self.places.volumes,
            volumes.TargetPath(target),
            volumes.SandboxId(name),
            volumes.HandlerName("kata"),
            features=frozenset(volumes.HandlerFeature),
        )
        with claim:
            yield claim.record.device

    async def check_gone(self, volume_id: str) -> None:
        """The volume can be unstaged and deleted, and nothing of it is left on the node."""
        await self.unstage(volume_id)
        await self.co.delete(volume_id)
        assert [each for each in loop_devices.list_all() if volume_id in each.backing] == []
        assert mountinfo.below(self.places.kubelet) == ()
        pods = Path(self.places.kubelet) / "pods"
        assert list(pods.glob("*/mount")) == []
        assert self.places.entries() == []


@asynccontextmanager
async def _chain(root: str, way: str) -> AsyncIterator[Chain]:
    chain = Chain(Places.make(root), way)
    await chain.start()
    try:
        yield chain
    finally:
        await chain.stack.aclose()
        await asyncio.to_thread(_tidy, root)


def _tidy(root: str) -> None:
    """Clean up after a failed test."""
    for mount in sorted(mountinfo.below(root), key=lambda each: -len(each.target)):
        mount_api.unmount(mount.target)
    for device in loop_devices.list_all():
        if device.backing.startswith(f"{root}/"):
            loop.detach(device)


@pytest.fixture(params=["processes", "node"])
async def chain(request: pytest.FixtureRequest) -> AsyncIterator[Chain]:
    """A node that serves, its parts in processes of their own or in one."""
    with tempfile.TemporaryDirectory(prefix="crust-") as root:
        async with _chain(root, request.param) as running_chain:
            yield running_chain


@pytest.fixture
def places() -> Iterator[Places]:
    with tempfile.TemporaryDirectory(prefix="crust-") as root:
        yield Places.make(root)


@pytest.fixture
def device(places: Places) -> Iterator[str]:
    image = f"{places.root}/volume.img"
    with open(image, "wb") as file:
        file.truncate(64 * MIB)
    subprocess.run(["mkfs.ext4", "-q", image], check=True, timeout=60)
    attached = loop.attach(image)
    yield attached.path
    for mount in mountinfo.below(places.kubelet):
        mount_api.unmount(mount.target)
    loop.detach(attached)
