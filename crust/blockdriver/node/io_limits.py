"""A volume's I/O limits while this host has it mounted, or a raw device bound: held by control groups, by device.

    attached                    every limit that the device's number has is taken away: it was another volume's
    published on the host       refused where the node cannot limit; the limits are set once it is mounted
    modified while published    set anew, see `changing`
    detached                    taken away
    the driver starts           each attached device gets what its volume's record and its mounts say

Set after the mount and not at the stage, because under control groups v1 the kernel's own share of the work is
limited with the rest: a mkfs or a repair would crawl. Nobody can use a target before its publish is answered.
A volume that a guest mounts is limited by its hypervisor (`deferring`), and by nothing here.
"""

import logging

from crust import errors, volumes
from crust.blockdriver.engines.protocol import Attachment
from crust.blockdriver.node.state import State
from crust.blockdriver.records.volume_record import Record
from crust.host.mounts import device_mounts, mountinfo

NONE = volumes.IoLimits()

_log = logging.getLogger(__name__)


def check(shared: State, record: Record) -> None:
    """Raise `throttling.CannotThrottle` if this host cannot hold the volume to its limits."""
    if record.io_limits != NONE:
        shared.throttle.check()


def hold(shared: State, record: Record, attachment: Attachment) -> None:
    """Set the limits of a volume that is on the host now; one without any was cleared when it was attached."""
    if record.io_limits != NONE:
        shared.throttle.set(attachment.source.identity, record.io_limits)


def release(shared: State, attachment: Attachment) -> None:
    """Take all limits of a device away, whoever set them."""
    shared.throttle.set(attachment.source.identity, NONE)


def let_go(shared: State, attachment: Attachment) -> None:
    """`release`, which costs nothing if the device was settled in this life and has no limits."""
    shared.throttle.release(attachment.source.identity)


def settle(shared: State, record: Record, attachment: Attachment) -> None:
    """Give an attached device what it should have at this moment, whatever an earlier life left it with."""
    used = record.io_limits != NONE and _is_on_host(attachment)
    limits = record.io_limits if used else NONE
    shared.throttle.set(attachment.source.identity, limits)


def recover(shared: State) -> None:
    """Settle every attached volume, after a start; what cannot be settled is told, and keeps nobody from starting."""
    for volume_id in shared.backend.attached_here():
        try:
            record = shared.volume_records.find(volume_id)
            attachment = shared.backend.attached(volume_id)
            if record is not None and attachment is not None:
                settle(shared, record, attachment)
        except errors.CrustError as err:
            told = {"volume_id": volume_id, "error": str(err)}
            _log.error("the I/O limits are not in force", extra=told)


def _is_on_host(attachment: Attachment) -> bool:
    """Asked of the kernel, because a ledger can be lost."""
    return any(device_mounts.shows(each, attachment.source) for each in mountinfo.below("/"))
