"""A volume's I/O limits while this host has it mounted, or a raw device bound: held by control groups, by device.

    attached                    all limits of the device number are removed: they were another volume's
    published on the host       refused where the node cannot set limits; else set after the mount
    modified while published    set again, by the controller part (`LimitEnforcement`)
    detached                    removed; set again if the detach is refused, for the holder of the device
    the driver starts           set for each attached device by its volume's record and mounts

The driver sets them after the mount: the stage does not know whether a guest will mount the volume. No pod uses a
target before the answer to its publish. The hypervisor applies the limits of a deferred volume (`deferred_publish`).
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from crust.blockdriver.engines.pool_access import Attachment
from crust.blockdriver.guests import Guests
from crust.blockdriver.host import device_mounts, throttling
from crust.blockdriver.records.stores import Stores
from crust.core import errors, volumes
from crust.host.mounts import mountinfo

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IoLimits:
    """Enforces limits on this host by `throttle`, and in `guests`."""

    stores: Stores
    throttle: throttling.Throttle
    guests: Guests

    def check_limits(self, volume_id: volumes.VolumeId, limits: volumes.IoLimits) -> None:
        """Raise `throttling.CannotThrottle` or NoRuntimeSocket if this node cannot enforce other limits."""
        if self.stores.node_state.deferred_targets(volume_id):
            self.guests.check_reachable()
        if limits != throttling.NONE and any(
            not publish.deferred for publish in self.stores.node_state.live_publishes(volume_id)
        ):
            self.throttle.check_can_limit()

    def hold(self, limits: volumes.IoLimits, device: volumes.BlockSource) -> None:
        """Set the limits of a volume that is on the host now; the attach has cleared earlier limits."""
        if limits != throttling.NONE:
            self.throttle.set(device.identity, limits)

    @contextlib.contextmanager
    def released(self, attachment: Attachment) -> Iterator[None]:
        """Remove the limits for a detach, because another device may get the number; restore them if it fails."""
        if attachment.device is None:
            yield
            return
        device = attachment.device.identity
        limits_before = self.throttle.limits_of(device)
        self.throttle.set(device, throttling.NONE)
        try:
            yield
        except errors.CrustError:
            self.throttle.set(device, limits_before)
            raise

    def settle(
        self,
        limits: volumes.IoLimits,
        attachment: Attachment,
        mounts: Sequence[mountinfo.Mount] = (),
    ) -> None:
        """Give an attached device the limits for now; `mounts`, if known, are now. Hypervisors limit their images."""
        if attachment.device is None:
            return
        used = limits != throttling.NONE and any(
            device_mounts.shows(mount, attachment.host_device)
            for mount in mounts or mountinfo.read_all()
        )
        self.throttle.set(attachment.host_device.identity, limits if used else throttling.NONE)

    def set_on_host(
        self,
        volume_id: volumes.VolumeId,
        limits: volumes.IoLimits,
        mounts: Sequence[mountinfo.Mount] = (),
    ) -> None:
        """`settle` the volume's device, if it has one."""
        attachment = self.stores.access.host_device(volume_id)
        if attachment is not None:
            self.settle(limits, attachment, mounts)

    async def set_in_guests(
        self, volume_id: volumes.VolumeId, limits: volumes.IoLimits, limits_before: volumes.IoLimits
    ) -> None:
        """As `LimitEnforcement` says; raises PublishInProgress, LimitsNotRestored and the errors of guests."""
        changed: list[volumes.TargetPath] = []
        for target in self.stores.node_state.deferred_targets(volume_id):
            try:
                await self.guests.set_limits(target, limits)
            except errors.PeerUnavailable:
                raise
            except errors.CrustError as err:
                for earlier in changed:
                    try:
                        await self.guests.set_limits(earlier, limits_before)
                    except errors.NotFound:
                        continue  # it is not published any more
                    except errors.CrustError as kept:
                        what = f"the guest at {earlier.text} keeps limits that another guest has refused"
                        # the change stays unfinished
                        raise errors.PeerUnavailable.named(
                            "LimitsNotRestored", what, why=str(kept)
                        ) from kept
                if isinstance(err, errors.NotFound):
                    raise errors.OperationPending.named(
                        "PublishInProgress",
                        f"{volume_id} is not modified",
                        why=f"it is deferred at {target.text}, and the proxy has no entry for it now",
                    ) from err
                raise
            changed.append(target)

    def recover(self) -> None:
        """Settle every attached volume; a failure is logged and does not stop the start.

        The driver serves no call yet, so one look at the mounts holds for all volumes.
        """
        mounts = mountinfo.read_all()
        for volume_id in self.stores.access.attached_here():
            try:
                record = self.stores.volume_records.find(volume_id)
                if record is not None:
                    self.set_on_host(volume_id, record.limits.value, mounts)
            except errors.CrustError as err:
                extra = {"volume_id": volume_id, "error": err}
                _log.error("the I/O limits of a volume are not enforced", extra=extra)
