"""A block driver's state on a directory of its own and a backend in memory: the rules without a server."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crust.blockdriver.controller.create_volume import Create
from crust.blockdriver.driver import Driver, build
from crust.blockdriver.records.node_state import Published
from crust.core import volumes
from tests.support.drivers import memory_backend
from tests.support.drivers.block_driver import mount
from tests.support.drivers.memory_backend import MemoryBackend
from tests.support.nodes.fake_throttle import FakeThrottle

NODE = "node-1"


def built(root: Path, *, backend: MemoryBackend | None = None, **options: Any) -> Driver:
    """A driver before its start; `options` are those of `build`."""
    (root / "state").mkdir(exist_ok=True)
    options.setdefault("throttle", FakeThrottle(obstacle="nothing here limits devices"))
    return build(
        run_dir=f"{root}/run",
        node_id=NODE,
        target_roots=("/",),
        engine=memory_backend.engine(f"{root}/state", backend or MemoryBackend()),
        **options,
    )


def opened(root: Path, **options: Any) -> Driver:
    """A driver as after a start; called again on the same directory, as after a restart."""
    made = built(root, **options)
    made.open()
    return made


def published(volume_id: volumes.VolumeId, target: str, **changes: Any) -> Published:
    """An entry of the node state: a guest has the volume, which holds ext4."""
    fields: dict[str, Any] = {
        "kind": "mount",
        "fs_type": "ext4",
        "mode": volumes.AccessMode.SINGLE_NODE_MULTI_WRITER.value,
        "options": (),
        "readonly": False,
        "deferred": True,
        "fingerprint": "",
        "done": True,
    }
    return Published(volume_id=volume_id, target=target, **fields | changes)


def create(
    name: str = "pvc-1",
    *,
    required: int = 0,
    limit: int = 0,
    capability: volumes.VolumeCapability | None = None,
    sent: Mapping[str, str] | None = None,
) -> Create:
    return Create(
        name,
        volumes.CapacityRange(required, limit),
        (capability or mount(),),
        tuple(sorted((sent or {}).items())),
    )


def expand(
    state: Driver,
    volume_id: volumes.VolumeId,
    wanted: volumes.CapacityRange,
    capability: volumes.VolumeCapability | None = None,
) -> tuple[int, bool]:
    """ControllerExpandVolume: the volume's size, and whether NodeExpandVolume is needed."""
    return state.controller.modifier.expand(volume_id, wanted, capability)
