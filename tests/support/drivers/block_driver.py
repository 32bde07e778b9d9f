"""The block driver on a directory of its own, driven as a CO drives it: the servicers' methods, without a socket."""

import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from crust.blockdriver import guests
from crust.blockdriver.driver import Driver, build
from crust.blockdriver.engines import files
from crust.blockdriver.engines.pool_access import PoolIds
from crust.blockdriver.host import throttling
from crust.blockdriver.services.roles import Role
from crust.core import volumes
from crust.core.settings.program import CsiProfile
from crust.host.process import syscalls
from crust.rpc.call import Call
from crust.rpc.messages import crust_v1
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import MIB as MIB
from tests.support.co import Answer, Co, encoded
from tests.support.drivers import memory_backend
from tests.support.drivers.memory_backend import MemoryBackend
from tests.support.records import pool_layout

Mode = volumes.AccessMode


def caller(method: str = "Method", *, left_s: float | None = None) -> Call:
    """A call for a servicer's method. `left_s`: until the caller's deadline; None: it has none."""
    return Call(f"/csi.v1.Service/{method}", (), left_s)


def is_there(path: str) -> bool:
    return os.path.lexists(path)


def mount(
    fs_type: str = "ext4",
    *flags: str,
    mode: Mode = Mode.SINGLE_NODE_MULTI_WRITER,
    group: volumes.GroupChange | None = None,
) -> volumes.VolumeCapability:
    return volumes.VolumeCapability(volumes.MountAccess(fs_type, flags, group), mode)


def block() -> volumes.VolumeCapability:
    return volumes.VolumeCapability(volumes.BlockAccess(), Mode.SINGLE_NODE_MULTI_WRITER)


class DirectCo(Co):
    """Calls the servicers of a driver in this process."""

    def __init__(self, driver: Driver) -> None:
        servicers = (driver.identity, driver.controller, driver.controller, driver.node)
        self.identity, self.controller, self.groups, self.node = (
            cast("Any", servicer) for servicer in servicers
        )

    async def _call(
        self, method: Callable[..., Awaitable[Answer]], request: Any, timeout_s: float | None = None
    ) -> Answer:
        return await method(request, caller(method.__name__, left_s=timeout_s))


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
    backend: MemoryBackend | None = None
    """In place of images in files."""
    driver: Driver = field(init=False)
    _staged: dict[tuple[str, str], None] = field(default_factory=dict, init=False)
    _published: dict[str, str] = field(default_factory=dict, init=False)
    """What `take_down` ends: volume and staging path of each stage, the volume of each target."""
    co: DirectCo = field(init=False)

    def __post_init__(self) -> None:
        for name in ("state", "run", "staging", "pods"):
            (self.root / name).mkdir(mode=0o700, exist_ok=True)
        self.restart()

    def lose_publishes(self) -> None:
        """Have the node state without a publish, from the next start on."""
        for path in (self.root / "run" / syscalls.boot_id()).glob("*.json"):
            path.write_text(json.dumps(json.loads(path.read_text()) | {"publishes": []}))

    def restart(self) -> None:
        """Restart: lose everything that is only in memory."""
        self.let_go()
        state, backend = str(self.root / "state"), self.backend
        self.driver = build(
            engine=files.engine(state, create=True)
            if backend is None
            else memory_backend.engine(state, backend),
            run_dir=str(self.root / "run"),
            node_id="node-1",
            target_roots=(str(self.root),),
            runtime_guests=self.runtime_guests,
            io_cgroup=self.io_cgroup,
            throttle=self.throttle,
            overcommit=self.overcommit,
            role=replace(self.role, csi_profile=self.profile),
        )
        self.driver.open()
        self.co = DirectCo(self.driver)

    def let_go(self) -> None:
        """Let the pool's filesystem be unmounted, as the death of a process does."""
        if hasattr(self, "driver"):
            self.driver.stores.pool.let_go()

    @property
    def ids(self) -> PoolIds:
        """The ids of the driver's pool."""
        return self.driver.stores.pool.ids

    def image(self, volume_id: str) -> Path:
        """The file of a volume's bytes."""
        return pool_layout.image(self.root / "state", volume_id)

    def host_device(self, volume_id: str) -> volumes.BlockSource:
        """The device of a volume that is attached."""
        attachment = self.driver.stores.access.attached(volumes.VolumeId(volume_id))
        assert attachment is not None
        return attachment.host_device

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
        mutable: dict[str, str] | None = None,
        **of: Any,
    ) -> csi_pb2.Volume:
        """CreateVolume; `of` has what else `create_request` takes."""
        wire = encoded(capability or mount())
        return await self.co.create(name, wire, mutable_parameters=mutable or {}, **of)

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

    async def up(
        self,
        volume_id: str,
        target: str,
        capability: volumes.VolumeCapability | None = None,
        **of: Any,
    ) -> None:
        """Stage and publish; `of` has what else `publish` takes."""
        await self.stage(volume_id, capability)
        await self.publish(volume_id, target, capability, **of)

    async def down(self, volume_id: str, target: str) -> None:
        await self.unpublish(volume_id, target)
        await self.unstage(volume_id)

    async def take_down(self) -> None:
        """End as a CO what the test has staged and published, and has not ended itself."""
        for target, volume_id in list(self._published.items()):
            await self.unpublish(volume_id, target)
        for volume_id, path in list(self._staged):
            await self.unstage(volume_id, path=path)

    async def delete(self, volume_id: str) -> None:
        await self.co.delete(volume_id)

    async def grow(self, volume_id: str, size: int) -> csi_pb2.ControllerExpandVolumeResponse:
        return await self.co.grow(volume_id, size)

    async def modify(self, volume_id: str, **mutable: str) -> None:
        await self.co.modify(volume_id, **mutable)

    async def stage(
        self,
        volume_id: str,
        capability: volumes.VolumeCapability | None = None,
        *,
        path: str = "",
        secrets: dict[str, str] | None = None,
    ) -> None:
        wire = encoded(capability or mount())
        staging = path or self.staging(volume_id)
        self._staged[volume_id, staging] = None
        await self.co.stage(volume_id, staging, wire, secrets=secrets or {})

    async def unstage(self, volume_id: str, *, path: str = "") -> None:
        staging = path or self.staging(volume_id)
        await self.co.unstage(volume_id, staging)
        self._staged.pop((volume_id, staging), None)

    async def publish(
        self,
        volume_id: str,
        target: str,
        capability: volumes.VolumeCapability | None = None,
        *,
        deferred: bool = False,
        context: dict[str, str] | None = None,
        path: str = "",
        **fields: Any,
    ) -> csi_pb2.NodePublishVolumeResponse:
        answer = await self.co.publish(
            volume_id,
            target,
            encoded(capability or mount(), deferred=deferred),
            defer=deferred,
            staging=path or self.staging(volume_id),
            volume_context=context or {},
            **fields,
        )
        self._published[target] = volume_id
        return answer

    async def unpublish(self, volume_id: str, target: str) -> None:
        await self.co.unpublish(volume_id, target)
        self._published.pop(target, None)

    async def attach(self, volume_id: str, *, readonly: bool = False) -> None:
        wire = encoded(mount())
        await self.co.attach(volume_id, "node-1", wire, readonly=readonly)

    async def release(self, volume_id: str) -> None:
        await self.co.detach(volume_id, "")

    async def stats(self, volume_id: str, path: str) -> volumes.VolumeStats:
        answer: Any = await self.co.stats(volume_id, path)
        reported = answer.volume_condition if answer.HasField("volume_condition") else None
        return crust_v1.stats(answer.usage, reported)

    async def expand(
        self, volume_id: str, path: str, size: int = 0, *, limit: int = 0, deferred: bool = False
    ) -> int:
        answer = await self.co.expand(volume_id, path, size, limit, defer_fs_ops=deferred)
        return answer.capacity_bytes
