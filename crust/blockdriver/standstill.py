"""What has to stand still for a copy of a volume to be one of a single moment.

    not in use                    nothing
    mounted on this host          its filesystem is frozen
    a raw device, published       nothing holds its writers: a copy must take no time, and of a group it can be none
    mounted by a guest            nobody here can freeze it: refused

Frozen, all that was written is in the copy. Without, a copy that takes no time is what a power cut leaves: that is a
raw device's user's business.
"""

from crust import errors, volumes
from crust.blockdriver import state
from crust.blockdriver.backends.protocol import Source
from crust.blockdriver.freezes import Freezable
from crust.blockdriver.state import State
from crust.host import mounts


class GuestWrites(errors.NotReady):
    """A guest has the volume mounted writable."""

    def __init__(self, volume_id: str, target: str) -> None:
        super().__init__(
            f"{volume_id} cannot be copied now",
            why=f"it is published with deferral at {target}, and a guest's filesystem cannot be frozen from here",
            hint="stop the pod, or publish the volume without deferral",
        )
        self.volume_id = volume_id
        self.target = target


class RawWrites(errors.NotReady):
    """A raw device is written to, and its writers cannot be held."""

    def __init__(self, volume_id: str, target: str, why: str) -> None:
        super().__init__(
            f"{volume_id} cannot be copied now",
            why=f"it is published as a raw device at {target}, and {why}",
            hint="unpublish it first",
        )
        self.volume_id = volume_id
        self.target = target


class NotReachable(errors.NotReady):
    """The filesystem is mounted where it cannot be frozen."""

    def __init__(self, volume_id: str) -> None:
        super().__init__(
            f"{volume_id} cannot be copied now",
            why="every place where it is mounted is covered by another mount",
            hint="unmount what covers it",
        )
        self.volume_id = volume_id


def check(
    shared: State, volume_id: volumes.VolumeId, *, together: bool = False
) -> Freezable | None:
    """What is to be frozen while the volume is copied, if anything; `together` with others.

    Raises `GuestWrites`, `RawWrites`, `NotReachable`. Holds as long as nobody else operates on the volume.
    """
    writers = [each for each in shared.live_publishes(volume_id) if not each.readonly]
    guest = next((each for each in writers if each.deferred), None)
    if guest is not None:
        raise GuestWrites(volume_id, guest.target)
    raw = next((each for each in writers if each.kind == "block"), None)
    if raw is not None and together:
        why = "its writers cannot be made to wait for the other members of the group"
        raise RawWrites(volume_id, raw.target, why)
    if raw is not None and not shared.backend.copies_at_once():
        raise RawWrites(volume_id, raw.target, "a copy would take time here, and be of no moment")
    attachment = shared.backend.attached(volume_id)
    return None if attachment is None else _mounted(volume_id, attachment.source)


def _mounted(volume_id: volumes.VolumeId, source: Source) -> Freezable | None:
    found = [each for each in state.host_mounts(source) if "ro" not in each.super_options]
    if not found:
        return None
    for mount in found:
        # What covers a mountpoint would be frozen in its stead.
        visible = mounts.at(mount.target)
        if visible is not None and visible.mount_id == mount.mount_id:
            return Freezable(volume_id, source.identity, mount.target)
    raise NotReachable(volume_id)
