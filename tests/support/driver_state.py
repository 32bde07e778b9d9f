"""A block driver's state on a directory of its own and a backend in memory: rules without a server."""

from collections.abc import Mapping
from pathlib import Path

from crust import errors, volumes
from crust.blockdriver.controller import capacity, topology
from crust.blockdriver.controller.create_volume import Create
from crust.blockdriver.controller.modify_volume import (
    Change,
    Expanded,
    Expansion,
    Outcome,
    VolumeModifier,
)
from crust.blockdriver.node.node_state import NodeState
from crust.blockdriver.node.state import State
from crust.blockdriver.records.volume_records import VolumeRecords
from tests.support.block_driver import mount
from tests.support.memory_backend import MemoryBackend

NODE = "node-1"


def opened(root: Path, *, backend: MemoryBackend | None = None, overcommit: float = 1.0) -> State:
    """A state as after a start; called again on the same directory, as after a restart."""
    made = State(
        volume_records=VolumeRecords(f"{root}/records"),
        node_state=NodeState(f"{root}/run"),
        backend=backend or MemoryBackend(),
        fs_types=("ext4", "xfs"),
        target_roots=("/",),
        overcommit=overcommit,
        node_id=NODE,
        here=topology.value_of(NODE),
    )
    made.volume_records.open()
    made.node_state.open("00000000-0000-0000-0000-000000000000")
    return made


def create(
    name: str = "pvc-1",
    *,
    required: int = 0,
    capability: volumes.VolumeCapability | None = None,
    sent: Mapping[str, str] | None = None,
    place: topology.Requirement = topology.ANYWHERE,
) -> Create:
    """A CreateVolume."""
    return Create(
        name,
        volumes.CapacityRange(required, 0),
        (capability or mount(),),
        tuple(sorted((sent or {}).items())),
        place,
    )


async def change(state: State, volume_id: volumes.VolumeId, what: Change) -> Outcome:
    """An application of changes; with what else was promised, as the driver counts it."""
    room = capacity.PoolCapacity(state.volume_records.index, state.backend, state.overcommit)
    return await VolumeModifier(state, room).apply(volume_id, what)


async def expand(
    state: State,
    volume_id: volumes.VolumeId,
    wanted: volumes.CapacityRange,
    capability: volumes.VolumeCapability | None = None,
) -> Expanded:
    """ControllerExpandVolume; raises why not."""
    expanded = (
        await change(state, volume_id, Change(expansion=Expansion(wanted, capability)))
    ).expanded
    if isinstance(expanded, errors.CrustError):
        raise expanded
    assert expanded is not None
    return expanded
