"""Proxy, shim and block driver on the real kernel, and a sandbox without a virtual machine."""

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from crust.blockdriver import serve
from crust.blockdriver.driver import build
from crust.blockdriver.services.roles import Role
from tests.support.co import MODE, capability
from tests.support.nodes import node as nodes
from tests.support.nodes.node import Places
from tests.support.nodes.served_node import ServedNode, started


@dataclass
class Chain(ServedNode):
    """A node with our driver, and a CO that calls it."""

    role: Role = field(default_factory=Role)
    """Of the driver, where each part is a process."""

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
        run_dir = f"{self.places.root}/driver-run"
        built = build(
            create_pool=True,
            state_dir=f"{self.places.root}/state",
            run_dir=run_dir,
            node_id="node-1",
            target_roots=(self.places.kubelet,),
            role=self.role,
        )
        serving = serve.running(built, socket=socket or self.places.driver, run_dir=run_dir)
        await self.daemons.enter_async_context(serving)

    async def volume(self, *, mode: int = MODE.SINGLE_NODE_MULTI_WRITER) -> str:
        """A new ext4 volume, staged at its first staging path; its id."""
        volume_id = (await self.co.create("pvc", capability(mode=mode))).volume_id
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


@pytest.fixture(params=["processes", "node"])
async def chain(request: pytest.FixtureRequest, places: Places) -> AsyncIterator[Chain]:
    """A node that serves, its parts in processes of their own or in one."""
    async with started(Chain(places, is_one_process=request.param == "node")) as running_chain:
        yield running_chain
