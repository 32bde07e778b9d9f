"""The block driver on a directory of its own, driven as a CO drives it: the servicers' methods, without a socket."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from crust.blockdriver import app
from crust.blockdriver.driver import Driver
from crust.blockdriver.node import guests
from crust.blockdriver.services.roles import CsiProfile, Role
from crust.core import volumes
from crust.core.pool_ids import PoolIds
from crust.host.cgroups import throttling
from crust.rpc.messages import csi, extensions
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import create_request, publish_request, stage_request

MIB = 1024 * 1024
Mode = volumes.AccessMode


class Caller:
    """The part of a call that a servicer sees: its metadata, and the time that its caller has left."""

    def __init__(self, *, knows_deferral: bool = False, left_s: float | None = None) -> None:
        self._knows_deferral = knows_deferral
        self._left_s = left_s

    def time_remaining(self) -> float | None:
        """Until the caller's deadline; None: it has none."""
        return self._left_s

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """The opt-in to deferral, or nothing."""
        return extensions.METADATA if self._knows_deferral else ()


def caller(*, knows_deferral: bool = False, left_s: float | None = None) -> Any:
    """A context for a servicer's method."""
    return cast("Any", Caller(knows_deferral=knows_deferral, left_s=left_s))


def is_there(path: str) -> bool:
    """Whether `path` exists."""
    return os.path.lexists(path)


def write_raw(path: str) -> None:
    """Write to a device, through to its image."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(fd, b"raw bytes", 4096)
        os.fsync(fd)
    finally:
        os.close(fd)


def mount(
    fs_type: str = "ext4",
    *flags: str,
    mode: Mode = Mode.SINGLE_NODE_MULTI_WRITER,
    group: volumes.GroupChange | None = None,
) -> volumes.VolumeCapability:
    """A filesystem capability."""
    return volumes.VolumeCapability(volumes.MountAccess(fs_type, flags, group), mode)


def block(mode: Mode = Mode.SINGLE_NODE_MULTI_WRITER) -> volumes.VolumeCapability:
    """A raw block capability."""
    return volumes.VolumeCapability(volumes.BlockAccess(), mode)


@dataclass(slots=True)
class Bench:
    """A driver and a CO's directories below `root`."""

    root: Path
    profile: CsiProfile = "1.12"
    runtime_guests: guests.Guests | None = None
    io_cgroup: str = ""
    throttle: throttling.Throttle | None = None
    overcommit: float = 1.0
    role: Role = Role()  # noqa: RUF009 - frozen
    driver: Driver = field(init=False)
    _staged: dict[tuple[str, str], None] = field(default_factory=dict, init=False)
    _published: dict[str, str] = field(default_factory=dict, init=False)
    """What `take_down` ends: volume and staging path of each stage, the volume of each target."""

    def __post_init__(self) -> None:
        for name in ("state", "run", "staging", "pods"):
            (self.root / name).mkdir(mode=0o700, exist_ok=True)
        self.restart()

    def restart(self) -> None:
        """Restart: lose everything that is only in memory."""
        self.let_go()
        self.driver = app.build(
            create_pool=True,
            state_dir=str(self.root / "state"),
            run_dir=str(self.root / "run"),
            node_id="node-1",
            csi_profile=self.profile,
            target_roots=(str(self.root),),
            runtime_guests=self.runtime_guests,
            io_cgroup=self.io_cgroup,
            throttle=self.throttle,
            overcommit=self.overcommit,
            role=self.role,
        )
        self.driver.open()

    def let_go(self) -> None:
        """Let the pool's filesystem be unmounted, as the death of a process does."""
        if hasattr(self, "driver"):
            self.driver.stores.pool.home.let_go()

    @property
    def ids(self) -> PoolIds:
        """The ids of the driver's pool."""
        return self.driver.stores.pool.ids

    def target(self, name: str) -> str:
        """A target path, below a parent that exists."""
        parent = self.root / "pods" / name
        if not parent.exists():
            parent.mkdir()
        return str(parent / "mount")

    def staging(self, volume_id: str, name: str = "globalmount") -> str:
        """A staging path, made as the CO makes it."""
        path = self.root / "staging" / f"{volume_id}-{name}"
        if not path.exists():
            path.mkdir()
        return str(path)

    async def create(
        self,
        name: str = "pvc-1",
        capability: volumes.VolumeCapability | None = None,
        *,
        size: int = 64 * MIB,
        parameters: dict[str, str] | None = None,
        mutable: dict[str, str] | None = None,
        **of: Any,
    ) -> csi_pb2.Volume:
        """CreateVolume; `of` has what else `create_request` takes."""
        request = create_request(
            name,
            csi.capability_to_wire(capability or mount()),
            size=size,
            parameters=parameters or {},
            mutable_parameters=mutable or {},
            **of,
        )
        return (await self.driver.controller.CreateVolume(request, caller())).volume

    async def staged(
        self, name: str = "pvc-1", capability: volumes.VolumeCapability | None = None, **of: Any
    ) -> str:
        """The id of a new volume, staged; `of` has what else `create` takes."""
        volume_id = (await self.create(name, capability, **of)).volume_id
        await self.stage(volume_id, capability)
        return volume_id

    async def published(
        self,
        name: str = "pvc-1",
        capability: volumes.VolumeCapability | None = None,
        *,
        readonly: bool = False,
        deferred: bool = False,
        **of: Any,
    ) -> tuple[str, str]:
        """The id of a new volume, staged and published, and its target."""
        volume_id, target = await self.staged(name, capability, **of), self.target("pod-a")
        await self.publish(volume_id, target, capability, readonly=readonly, deferred=deferred)
        return volume_id, target

    async def take_down(self) -> None:
        """End as a CO what the test has staged and published, and has not ended itself."""
        for target, volume_id in list(self._published.items()):
            await self.unpublish(volume_id, target)
        for volume_id, path in list(self._staged):
            await self.unstage(volume_id, path=path)

    async def delete(self, volume_id: str) -> None:
        """DeleteVolume."""
        request = csi_pb2.DeleteVolumeRequest(volume_id=volume_id)
        await self.driver.controller.DeleteVolume(request, caller())

    async def grow(
        self, volume_id: str, size: int, *, limit: int = 0
    ) -> csi_pb2.ControllerExpandVolumeResponse:
        """ControllerExpandVolume."""
        wanted = csi_pb2.CapacityRange(required_bytes=size, limit_bytes=limit)
        request = csi_pb2.ControllerExpandVolumeRequest(volume_id=volume_id, capacity_range=wanted)
        return await self.driver.controller.ControllerExpandVolume(request, caller())

    async def modify(self, volume_id: str, **mutable: str) -> None:
        """ControllerModifyVolume."""
        request = csi_pb2.ControllerModifyVolumeRequest(
            volume_id=volume_id, mutable_parameters=mutable
        )
        await self.driver.controller.ControllerModifyVolume(request, caller())

    async def stage(
        self,
        volume_id: str,
        capability: volumes.VolumeCapability | None = None,
        *,
        path: str = "",
        secrets: dict[str, str] | None = None,
    ) -> None:
        """NodeStageVolume."""
        wire = csi.capability_to_wire(capability or mount())
        staging = path or self.staging(volume_id)
        request = stage_request(volume_id, staging, wire, secrets=secrets or {})
        self._staged[volume_id, staging] = None
        await self.driver.node.NodeStageVolume(request, caller())

    async def unstage(self, volume_id: str, *, path: str = "") -> None:
        """NodeUnstageVolume."""
        staging = path or self.staging(volume_id)
        request = csi_pb2.NodeUnstageVolumeRequest(volume_id=volume_id, staging_target_path=staging)
        await self.driver.node.NodeUnstageVolume(request, caller())
        self._staged.pop((volume_id, staging), None)

    async def publish(
        self,
        volume_id: str,
        target: str,
        capability: volumes.VolumeCapability | None = None,
        *,
        readonly: bool = False,
        deferred: bool = False,
        context: dict[str, str] | None = None,
        path: str = "",
        secrets: dict[str, str] | None = None,
    ) -> csi_pb2.NodePublishVolumeResponse:
        """NodePublishVolume."""
        request = publish_request(
            volume_id,
            target,
            csi.capability_to_wire(capability or mount(), deferred=deferred),
            defer=deferred,
            staging=path or self.staging(volume_id),
            secrets=secrets or {},
            readonly=readonly,
            volume_context=context or {},
        )
        answer = await self.driver.node.NodePublishVolume(request, caller())
        self._published[target] = volume_id
        return answer

    async def unpublish(self, volume_id: str, target: str) -> None:
        """NodeUnpublishVolume."""
        request = csi_pb2.NodeUnpublishVolumeRequest(volume_id=volume_id, target_path=target)
        await self.driver.node.NodeUnpublishVolume(request, caller())
        self._published.pop(target, None)

    async def attach(self, volume_id: str, *, readonly: bool = False) -> None:
        """ControllerPublishVolume to this node."""
        request = csi_pb2.ControllerPublishVolumeRequest(
            volume_id=volume_id,
            node_id="node-1",
            volume_capability=csi.capability_to_wire(mount()),
            readonly=readonly,
        )
        await self.driver.controller.ControllerPublishVolume(request, caller())

    async def release(self, volume_id: str, node_id: str = "") -> None:
        """ControllerUnpublishVolume."""
        request = csi_pb2.ControllerUnpublishVolumeRequest(volume_id=volume_id, node_id=node_id)
        await self.driver.controller.ControllerUnpublishVolume(request, caller())

    async def stats(
        self, volume_id: str, path: str, *, deferred: bool = False
    ) -> volumes.VolumeStats:
        """NodeGetVolumeStats."""
        request = csi_pb2.NodeGetVolumeStatsRequest(
            volume_id=volume_id, volume_path=path, defer_fs_ops=deferred
        )
        return csi.stats(await self.driver.node.NodeGetVolumeStats(request, caller()))

    async def expand(
        self, volume_id: str, path: str, size: int = 0, *, limit: int = 0, deferred: bool = False
    ) -> int:
        """NodeExpandVolume."""
        request = csi_pb2.NodeExpandVolumeRequest(
            volume_id=volume_id,
            volume_path=path,
            capacity_range=csi_pb2.CapacityRange(required_bytes=size, limit_bytes=limit),
            defer_fs_ops=deferred,
        )
        return (await self.driver.node.NodeExpandVolume(request, caller())).capacity_bytes
