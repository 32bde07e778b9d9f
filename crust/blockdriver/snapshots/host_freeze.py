"""Freezing filesystems of this host while their images are copied, for a limited time.

A freeze outlives the process that made it, so an intent is recorded first, and a restarted driver thaws before
everything else (`Freezer.thaw_mounted`). While the process lives, a timer thaws what takes too long: a stopped
database is an outage, and the copy is then discarded as inconsistent. Of a group all are frozen before the first is
copied.

Filesystems in guests are frozen by `guest_freeze`, around this.
"""

import logging
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

from crust.blockdriver.engines.protocol import NodeAccess
from crust.blockdriver.snapshots.freeze_intents import Intent, Intents
from crust.core import errors, volumes
from crust.host.block import devices, holders, signatures
from crust.host.filesystems import fsfreeze
from crust.host.mounts import device_mounts, mountinfo

LIMIT_S = 60.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Freezable:
    """A filesystem that this host has mounted."""

    volume_id: volumes.VolumeId
    identity: volumes.DeviceIdentity
    mountpoint: str


@dataclass(slots=True)
class _FrozenSet:
    """The filesystems that are frozen now, shared by the timer and the copying thread."""

    guard: threading.Lock = field(default_factory=threading.Lock)
    frozen: list[tuple[Freezable, fsfreeze.Freeze]] = field(default_factory=list)
    expired: bool = False


class Freezer:
    """Freezes and thaws. `limit_s` is the longest freeze."""

    def __init__(self, intents: Intents, access: NodeAccess, *, limit_s: float = LIMIT_S) -> None:
        self._intents = intents
        self._access = access
        self._limit_s = limit_s

    def thaw_mounted(self, left: Intent) -> None:
        """Thaw what a killed driver may have left frozen, if it is mounted here. Needs no engine."""
        with _telling(left):
            mount = _mount_of(left.identity)
            if mount is None:
                return
            fsfreeze.thaw(mount.target)
            _log.warning(
                "thawed a filesystem that was left frozen", extra={"volume_id": left.volume_id}
            )
            self._intents.forget(left.volume_id)

    def thaw_unmounted(self, left: Intent) -> None:
        """The same for filesystems that are unmounted or covered: frozen ones stay alive without a path."""
        with _telling(left):
            self._thaw_unmounted(left)
            self._intents.forget(left.volume_id)

    @contextmanager
    def frozen(self, members: Sequence[Freezable]) -> Iterator[None]:
        """Keep all of `members` frozen while the block runs; blocks its thread.

        Raises `FrozenTooLong` afterwards if they did not: what was copied is to be thrown away. Raises
        `fsfreeze.AlreadyFrozen` if another program froze one.
        """
        if not members:
            yield
            return
        frozen_set = _FrozenSet()
        timer = threading.Timer(self._limit_s, self._expire, [frozen_set])
        with ExitStack() as stack:
            stack.callback(self._release, frozen_set)
            timer.start()
            stack.callback(timer.cancel)
            for member in members:
                self._freeze(frozen_set, member)
            yield
        if frozen_set.expired:
            raise errors.NotReady.named(
                "FrozenTooLong",
                f"{', '.join([each.volume_id for each in members])} is not copied",
                why=f"its filesystem would have been frozen for more than {self._limit_s:g} s",
                hint=(
                    "unpublish it first, or keep the pool on xfs or btrfs, where a copy takes no "
                    "time"
                ),
            )

    def _freeze(self, frozen_set: _FrozenSet, member: Freezable) -> None:
        self._intents.note(Intent(member.volume_id, identity=str(member.identity)))
        try:
            freeze = fsfreeze.Freeze(member.mountpoint)
        except errors.CrustError:
            self._intents.forget(member.volume_id)
            raise
        with frozen_set.guard:
            frozen_set.frozen.append((member, freeze))
            expired = frozen_set.expired
        if expired:  # the timer was faster
            self._release(frozen_set)

    def _expire(self, frozen_set: _FrozenSet) -> None:
        with frozen_set.guard:
            frozen_set.expired = True
        _log.error("a freeze took too long and was undone", extra={"limit_s": self._limit_s})
        self._release(frozen_set)

    def _release(self, frozen_set: _FrozenSet) -> None:
        with frozen_set.guard:
            failures = [err for each in frozen_set.frozen if (err := self._thaw(*each)) is not None]
            frozen_set.frozen.clear()
        if failures:
            raise failures[0]

    def _thaw(self, member: Freezable, freeze: fsfreeze.Freeze) -> errors.CrustError | None:
        try:
            freeze.thaw()
            self._intents.forget(member.volume_id)
        except errors.CrustError as err:
            _log.error(
                "a filesystem cannot be thawed", extra={"volume_id": member.volume_id, "error": err}
            )
            return err
        return None

    def _thaw_unmounted(self, left: Intent) -> None:
        attachment = self._access.attached(left.volume_id)
        source = attachment.device if attachment else None
        if source is None or str(source.identity) != left.identity:
            return  # no device any more: no filesystem either
        device = source.path
        if not holders.is_exclusively_held(device):
            return  # no filesystem has it open
        found = signatures.probe_untrusted(device)
        if not isinstance(found, signatures.Filesystem):
            return
        with suppress(holders.DeviceInUse):  # a guest or a tool has it by now
            fsfreeze.thaw_unmounted(device, found.type)
            _log.warning(
                "thawed a filesystem that was left frozen without a mount",
                extra={"volume_id": left.volume_id},
            )


@contextmanager
def _telling(left: Intent) -> Iterator[None]:
    """Log it; the intent stays for the next start."""
    try:
        yield
    except errors.CrustError as err:
        _log.error("a filesystem stays frozen", extra={"volume_id": left.volume_id, "error": err})


def _mount_of(identity: str) -> mountinfo.Mount | None:
    """A visible mount of the device with this identity; its numbers may have been reused."""
    numbers = re.fullmatch(r"(\d+):(\d+)@\d+", identity)
    if numbers is None:
        return None
    for mount in mountinfo.of_device(int(numbers[1]), int(numbers[2])):
        with suppress(errors.CrustError):
            if device_mounts.is_visible(mount) and str(devices.identify(mount.source)) == identity:
                return mount
    return None
