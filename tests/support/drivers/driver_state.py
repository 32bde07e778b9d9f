"""A block driver's state on a directory of its own and a backend in memory: the rules without a server."""

from collections.abc import Mapping
from pathlib import Path

from crust.blockdriver import guests
from crust.blockdriver.controller import topology
from crust.blockdriver.controller.create_volume import Create
from crust.blockdriver.controller.modify_volume import Expansion
from crust.blockdriver.driver import Driver, build
from crust.core import volumes
from crust.host.cgroups import throttling
from tests.support.drivers import memory_backend
from tests.support.drivers.block_driver import mount
from tests.support.drivers.memory_backend import MemoryBackend
from tests.support.nodes.fake_throttle import FakeThrottle

NODE = "node-1"


def opened(
    root: Path,
    *,
    backend: MemoryBackend | None = None,
    overcommit: float = 1.0,
    max_volumes: int = 128,
    runtime_guests: guests.Guests | None = None,
    throttle: throttling.Throttle | None = None,
) -> Driver:
    """A driver as after a start; called again on the same directory, as after a restart."""
    (root / "state").mkdir(exist_ok=True)
    made = build(
        state_dir=f"{root}/state",
        run_dir=f"{root}/run",
        node_id=NODE,
        target_roots=("/",),
        engine=memory_backend.engine(f"{root}/state", backend or MemoryBackend()),
        overcommit=overcommit,
        max_volumes=max_volumes,
        runtime_guests=runtime_guests,
        throttle=throttle or FakeThrottle(obstacle="nothing here limits devices"),
    )
    made.open()
    return made


def create(
    name: str = "pvc-1",
    *,
    required: int = 0,
    capability: volumes.VolumeCapability | None = None,
    sent: Mapping[str, str] | None = None,
    place: topology.Requirement = topology.ANYWHERE,
) -> Create:
    return Create(
        name,
        volumes.CapacityRange(required, 0),
        (capability or mount(),),
        tuple(sorted((sent or {}).items())),
        place,
    )


async def expand(
    state: Driver,
    volume_id: volumes.VolumeId,
    wanted: volumes.CapacityRange,
    capability: volumes.VolumeCapability | None = None,
) -> tuple[int, bool]:
    """ControllerExpandVolume: the volume's size, and whether NodeExpandVolume is needed."""
    return await state.controller.modifier.expand(volume_id, Expansion(wanted, capability))
