"""A node whose driver knows nothing of crust: the driver as a process, shim and proxy around it, and a CO."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from crust.core import volumes
from crust.csi_shim.wrap.node_shim import Wrapping
from crust.csi_shim.wrap.private_directories import PrivatePaths
from crust.host.block import loopctl
from crust.host.mounts import mountinfo
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2
from examples.drivers import cloud as cloud_driver
from examples.drivers import disks
from tests.support import trees
from tests.support.co import Co, capability, publish_request, stage_request
from tests.support.drivers import remnants, vendor_driver
from tests.support.drivers.vendor_driver import NAMES
from tests.support.nodes import proxy_process
from tests.support.nodes.node import PARTS
from tests.support.nodes.places import Places
from tests.support.nodes.served_node import ONE_PROCESS, ServedNode, started

ATTACHING = {"cloud", "stateful"}
"""Drivers that attach in ControllerPublishVolume, and stage."""
DEFERRED = {"crust.dev/defer": "always", "crust.dev/runtime-handler": "kata"}
SECRETS = {"token": cloud_driver.TOKEN}
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Volume:
    """A volume as a CO knows it."""

    volume_id: str
    context: dict[str, str]
    publish_context: dict[str, str]
    capability: csi_pb2.VolumeCapability


@dataclass
class Wrapped(ServedNode):
    """The processes of the node, and its CO."""

    driver: vendor_driver.VendorDriver = field(kw_only=True)
    """A process, which ends and starts by its own methods."""
    wrapping: Wrapping = field(kw_only=True)
    is_decided: bool = field(default=True, kw_only=True)
    """Whether the proxy says with each stage how the volume is staged. If not, the CO stages past the proxy."""

    def tables(self) -> dict[str, Any]:
        shim = {
            "socket": self.places.shim,
            "driver_socket": self.driver.socket,
            "kubelet_root": self.places.kubelet,
        }
        return {"shim": shim}

    async def killable_shim(self, *, die_at: int = proxy_process.NEVER) -> proxy_process.Killable:
        """A shim in a process of its own, in place of the other one."""
        shim = proxy_process.running_shim(self.places, wrapping=self.wrapping, die_at=die_at)
        return await self.enter("shim", shim)

    async def reboot(self) -> None:
        """Mounts, mappings, processes and /run are gone; what is on the disk is there."""
        await self.stop()
        await asyncio.to_thread(self.driver.kill)
        await asyncio.to_thread(remnants.remove, self.places.root)
        await asyncio.to_thread(shutil.rmtree, self.places.run)
        await asyncio.to_thread(self.driver.start)
        await self.start()

    async def restart_driver(self) -> None:
        """Start the driver again once it has died, without its misbehaviour."""
        await asyncio.to_thread(self.driver.wait)
        self.driver.misbehave()
        await asyncio.to_thread(self.driver.start)

    async def attach(self, volume: Volume) -> Volume:
        if self.driver.kind not in ATTACHING:
            return volume
        request = csi_pb2.ControllerPublishVolumeRequest(
            volume_id=volume.volume_id,
            node_id=vendor_driver.NODE,
            volume_capability=volume.capability,
        )
        answer = await self.controller.ControllerPublishVolume(request, timeout=TIMEOUT_S)
        return replace(volume, publish_context=dict(answer.publish_context))

    def paths(self, volume: Volume) -> PrivatePaths:
        """Where it is staged and published as block."""
        driver = volumes.DriverName(self.driver_name)
        key = volumes.VolumeKey(driver, volumes.VolumeId(volume.volume_id))
        return PrivatePaths.of(self.places.kubelet, key)

    def staging(self, volume: Volume) -> str:
        """The kubelet's staging path, which it makes."""
        name = f"{len(volume.volume_id)}-{volume.volume_id[-20:].replace('/', '_')}"
        path = (
            f"{self.places.kubelet}/plugins/kubernetes.io/csi/{self.driver.kind}/{name}/globalmount"
        )
        os.makedirs(path, 0o750, exist_ok=True)
        return path

    def target(self, pod: str) -> str:
        """A target path, whose parent the kubelet makes."""
        path = f"{self.places.kubelet}/pods/{pod}/volumes/kubernetes.io~csi/pvc-1"
        os.makedirs(path, 0o750, exist_ok=True)
        return f"{path}/mount"

    async def volume(
        self,
        name: str = "pvc-1",
        *,
        context: dict[str, str] | None = None,
        of: csi_pb2.VolumeCapability | None = None,
        mkfs: bool = True,
    ) -> Volume:
        """A new volume, attached; with an ext4 that somebody made."""
        wanted = of or capability()
        given = DEFERRED if context is None else context
        # as the controller's shim asks for it: one driver fixes the kind then
        created = capability(block=True) if given.get("crust.dev/defer") == "always" else wanted
        made = await self.co.create(name, created)
        self.created[made.volume_id] = None
        if mkfs:
            image = max(self.driver.images(), key=os.path.getmtime)
            await asyncio.to_thread(disks.run, "mkfs.ext4", "-q", image)
        given = {**made.volume_context, **given}
        return await self.attach(Volume(made.volume_id, given, {}, wanted))

    async def staged_volume(self, name: str = "pvc-1", **of: Any) -> tuple[Volume, str]:
        """A new volume, staged, and a target for it; `of` has what else `volume` takes."""
        volume, target = await self.volume(name, **of), self.target("one")
        await self.stage(volume)
        return volume, target

    async def published_volume(self, name: str = "pvc-1", **of: Any) -> tuple[Volume, str]:
        """A new volume, staged and published, and its target; `of` has what else `volume` takes."""
        volume, target = await self.staged_volume(name, **of)
        await self.publish(volume, target)
        return volume, target

    @property
    def stages(self) -> bool:
        """Whether a kubelet stages volumes of this driver."""
        return self.driver.kind in ATTACHING

    def stage_request(
        self, volume: Volume, secrets: dict[str, str] | None = None
    ) -> csi_pb2.NodeStageVolumeRequest:
        return stage_request(
            volume.volume_id,
            self.staging(volume),
            volume.capability,
            publish_context=volume.publish_context,
            secrets=SECRETS if secrets is None else secrets,
            volume_context=volume.context,
        )

    async def stage(self, volume: Volume, secrets: dict[str, str] | None = None) -> None:
        if self.stages:
            request = self.stage_request(volume, secrets)
            socket = self.places.csi if self.is_decided else self.places.shim
            async with channel.connect(socket) as connected:
                call = Co(connected).node.NodeStageVolume(request, timeout=TIMEOUT_S)
                await self.note_stage(volume.volume_id, request.staging_target_path, call)

    async def unstage(self, volume: Volume) -> None:
        if self.stages:
            await self.end_stage(volume.volume_id, self.staging(volume))

    def publish_request(
        self, volume: Volume, target: str, *, flag: bool = False, **fields: Any
    ) -> csi_pb2.NodePublishVolumeRequest:
        context = {**volume.context, "csi.storage.k8s.io/pod.name": "pod"}
        return publish_request(
            volume.volume_id,
            target,
            volume.capability,
            defer=flag,
            staging=self.staging(volume) if self.stages else "",
            publish_context=volume.publish_context,
            volume_context=context,
            **fields,
        )

    async def publish(
        self,
        volume: Volume,
        target: str,
        *,
        flag: bool = False,
        timeout_s: float = TIMEOUT_S,
        **fields: Any,
    ) -> None:
        request = self.publish_request(volume, target, flag=flag, **fields)
        call = self.node.NodePublishVolume(request, timeout=timeout_s)
        await self.note_publish(volume.volume_id, target, call)

    async def unpublish(self, volume: Volume, target: str) -> None:
        await self.end_publish(volume.volume_id, target)

    async def expand(self, volume: Volume, target: str, size: int) -> int:
        of = volume.capability
        await self.co.grow(volume.volume_id, size, volume_capability=of)
        staging = self.staging(volume)
        answer = await self.co.expand(
            volume.volume_id, target, size, staging_target_path=staging, volume_capability=of
        )
        return answer.capacity_bytes

    async def delete_volume(self, volume_id: str) -> None:
        if self.driver.kind in ATTACHING:
            await self.co.detach(volume_id, "")
        await super().delete_volume(volume_id)

    def life(self, volume: Volume, target: str) -> dict[str, Callable[[], Awaitable[None]]]:
        """What a kubelet calls for a volume, from its stage to its unstage."""
        return {
            "NodeStageVolume": lambda: self.stage(volume),
            "NodePublishVolume": lambda: self.publish(volume, target),
            "NodeUnpublishVolume": lambda: self.unpublish(volume, target),
            "NodeUnstageVolume": lambda: self.unstage(volume),
        }

    async def survives(self, call: Awaitable[None]) -> bool:
        """Whether the shim lives to answer a call."""
        try:
            await call
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return True

    def check_unpublished(self, volume: Volume, target: str) -> None:
        """Nothing of a publish is there."""
        assert self.entry(target) is None
        assert self.places.entries() == []
        assert not os.path.lexists(target)
        assert not os.path.lexists(self.paths(volume).published)
        staging = self.paths(volume).staging
        mounts = [mount.target for mount in mountinfo.below(self.places.kubelet)]
        assert [mount for mount in mounts if not mount.startswith(f"{staging}/")] == []

    async def take_down(self) -> None:
        """As the CO of a driver that has no faults any more."""
        self.driver.misbehave()
        await super().take_down()

    def check_clean(self) -> None:
        """Check that no private directory of a volume is there, either."""
        # losetup(8), by which these drivers detach, does not wait for another program that has the device open for a
        # moment: its last close detaches it
        loopctl.wait_until(lambda: remnants.devices(self.places.root) == [])
        super().check_clean()
        private = Path(self.places.kubelet, "plugins/kubernetes.io/csi/volumeDevices")
        assert [*private.glob("*/*")] == []


@asynccontextmanager
async def node_with(
    kind: str,
    *,
    is_decided: bool = True,
    defer: str = "",
    is_one_process: bool = False,
) -> AsyncIterator[Wrapped]:
    with (
        trees.temporary("crust-") as root,
        vendor_driver.running(kind, root) as driver,
    ):
        places = Places.make(root)
        node = Wrapped(
            places,
            driver=driver,
            driver_name=NAMES[kind],
            wrapping=Wrapping(places.kubelet),
            is_decided=is_decided,
            defer=defer,
            parts=ONE_PROCESS if is_one_process else PARTS[1:],
        )
        async with started(node):
            try:
                yield node
            finally:
                driver.release()


@pytest.fixture(params=["cloud", "minimal", "stateful"])
async def node(request: pytest.FixtureRequest) -> AsyncIterator[Wrapped]:
    """With each of the three drivers."""
    async with node_with(request.param) as running_node:
        yield running_node


@pytest.fixture
async def cloud() -> AsyncIterator[Wrapped]:
    async with node_with("cloud") as running_node:
        yield running_node


@pytest.fixture
async def stateful() -> AsyncIterator[Wrapped]:
    """With the driver that keeps an account of where each volume is."""
    async with node_with("stateful") as running_node:
        yield running_node
