"""What the node side of the driver shares, and the questions that several of its rules ask of the kernel."""

from dataclasses import dataclass, field

from crust import errors, volumes
from crust.blockdriver.engines.protocol import Attachment, Backend, Source
from crust.blockdriver.node.guests import Guests, UnreachableGuests
from crust.blockdriver.node.node_state import NodeState, Published
from crust.blockdriver.records.volume_records import VolumeRecords
from crust.host.cgroups import throttling
from crust.host.mounts import device_mounts, mount_capacity, mountinfo


class NotStaged(errors.NotReady):
    """A volume is to be used that was not staged, or whose device is gone since."""

    def __init__(self, volume_id: str, why: str = "") -> None:
        super().__init__(
            f"{volume_id} is not staged on this node", why=why, hint="call NodeStageVolume first"
        )
        self.volume_id = volume_id


@dataclass(frozen=True, slots=True)
class State:
    """Records, ledger and bytes. `target_roots` are the directories below which a CO may have targets."""

    volume_records: VolumeRecords
    node_state: NodeState
    backend: Backend
    fs_types: tuple[str, ...]
    target_roots: tuple[str, ...]
    overcommit: float = 1.0
    """Of the pool's room, how much is promised to volumes."""
    max_volumes: int = 0
    """How many volumes this node may hold, as the operator says; 0: as the kernel's limits allow."""
    node_id: str = "node"
    """This node, as the CO names it."""
    here: str = "node"
    """This node as a topology segment's value."""
    guests: Guests = field(default_factory=UnreachableGuests)
    """Whoever has this driver's deferred volumes."""
    throttle: throttling.Throttle = field(default_factory=throttling.NoThrottle)
    """Limits of what this host has mounted."""

    def attach_limit(self) -> int:
        """How many volumes this node can hold at once; what the engine can have attached is a bound for anybody."""
        wanted = self.max_volumes or mount_capacity.max_volumes()
        return min(wanted, self.backend.attach_limit() or wanted)

    def staged_attachment(self, volume_id: volumes.VolumeId) -> Attachment:
        """The device of a staged volume; raises `NotStaged`."""
        if self.node_state.staged(volume_id) is None:
            raise NotStaged(volume_id)
        attachment = self.backend.attached(volume_id)
        if attachment is None:
            raise NotStaged(volume_id, "its device was detached behind the driver's back")
        return attachment

    def live_publishes(self, volume_id: volumes.VolumeId) -> tuple[Published, ...]:
        """What is published of a volume at this moment: the kernel wins over the ledger."""
        entries = self.node_state.published_of(volume_id)
        if not entries:
            return ()
        attachment = self.backend.attached(volume_id)
        source = attachment.device if attachment else None
        return tuple(entry for entry in entries if is_live(entry, source))


def is_live(entry: Published, source: Source | None) -> bool:
    """Whether a ledger entry still stands: a deferred one by its word, a mounted one by its mount."""
    if entry.deferred:
        return True
    mount = mountinfo.at(entry.target)
    return mount is not None and source is not None and device_mounts.shows(mount, source)
