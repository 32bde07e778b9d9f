"""A complete node for end-to-end tests: driver, shim, proxy and runtime as processes, and a client like a kubelet."""

import contextlib
import itertools
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from crust.core import errors
from crust.wire.csi.v1 import csi_pb2
from examples.kata.demo import orphans
from examples.kata.demo.kubelet import MOUNT, Kubelet
from examples.kata.demo.node import HANDLER, Node, Vendor
from examples.kata.runtime import messages
from examples.kata.runtime.client import Client, Finished
from examples.kata.vm import machine
from tests.support import trees

MIB = 1 << 20
_numbers = itertools.count(1)


class GuestCommands:
    """Shell scripts in sandboxes of a runtime, which are kept, with a volume at /data."""

    runtime: Client

    @staticmethod
    def request(
        sandbox: str, source: Path | str, script: str, *, readonly: bool = False
    ) -> messages.Run:
        mount = messages.Mount(source=str(source), destination="/data", readonly=readonly)
        argv = ("/bin/sh", "-ec", script)
        return messages.Run(sandbox=sandbox, argv=argv, mounts=(mount,), keep=True)

    async def run(
        self, sandbox: str, source: Path | str, script: str, *, readonly: bool = False
    ) -> Finished:
        return await self.runtime.run(self.request(sandbox, source, script, readonly=readonly))

    async def output(self, sandbox: str, source: Path | str, script: str) -> str:
        """The output of a script that must succeed."""
        ended = await self.run(sandbox, source, script)
        assert ended.code == 0, ended
        return ended.stdout.decode().strip()

    async def qemu_pid(self, sandbox: str) -> int:
        """The pid of a sandbox's QEMU."""
        listed = await self.runtime.list()
        return next(int(box["pid"]) for box in listed if box["sandbox"] == sandbox)


@dataclass(slots=True)
class WholeNode(GuestCommands):
    """The processes, and clients that call them."""

    daemons: Node
    kubelet: Kubelet
    runtime: Client
    published: list[tuple[csi_pb2.Volume, Path]] = field(default_factory=list)
    volumes: list[csi_pb2.Volume] = field(default_factory=list)

    async def volume(
        self,
        *,
        size_bytes: int = 64 * MIB,
        capability: csi_pb2.VolumeCapability = MOUNT,
        stage: bool = True,
        snapshot_id: str = "",
    ) -> csi_pb2.Volume:
        name = f"e2e-{next(_numbers)}"
        volume = await self.kubelet.create(name, size_bytes, capability, snapshot_id=snapshot_id)
        self.volumes.append(volume)
        if stage:
            await self.kubelet.stage(volume, capability)
        return volume

    async def publish(
        self,
        volume: csi_pb2.Volume,
        *,
        defer: bool = True,
        capability: csi_pb2.VolumeCapability = MOUNT,
        readonly: bool = False,
    ) -> Path:
        """Publish it for a new pod; returns the target path."""
        target = self.kubelet.target(f"pod-{next(_numbers)}")
        await self.kubelet.publish(
            volume, target, defer=defer, capability=capability, readonly=readonly
        )
        self.published.append((volume, target))
        return target

    async def unpublish(self, volume: csi_pb2.Volume, target: Path) -> None:
        await self.kubelet.unpublish(volume, target)
        self.published.remove((volume, target))

    async def tidy(self) -> None:
        """Stop all sandboxes; unpublish, unstage and delete the volumes of a test."""
        for box in await self.runtime.list():
            await self.runtime.stop(box["sandbox"])
        for volume, target in self.published:
            await self.kubelet.unpublish(volume, target)
        for volume in self.volumes:
            await self.kubelet.unstage(volume)
            await self.kubelet.delete(volume)
        self.published.clear()
        self.volumes.clear()


@asynccontextmanager
async def whole_node(
    vendor: Vendor | None = None, *, runtime_options: tuple[str, ...] = ()
) -> AsyncIterator[WholeNode]:
    """A running node; asserts at the end that no loop device, mount or process of it remains.

    With `vendor` it has that driver, and no other.
    """
    base = Path(tempfile.mkdtemp(prefix="crust-e2e-"))
    before = orphans.find(base)
    node = Node(base, vendor)
    node.runtime_options = runtime_options
    at = node.paths
    kubelet = Kubelet(at.kubelet, at.csi_socket, at.inspect_socket, at.controller_socket)
    try:
        await node.start_all()
        await kubelet.wait_ready(HANDLER)
        yield WholeNode(node, kubelet, Client(str(at.kata_run / "control.sock")))
    finally:
        await kubelet.close()
        await node.stop_all()
        for directory in (at.kata_run / "sandboxes").glob("*"):
            with contextlib.suppress(errors.CrustError):
                await machine.destroy(directory)
        left = orphans.find(base).since(before)
        assert not left
        trees.remove(base)
