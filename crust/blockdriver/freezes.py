"""Filesystems that stand still while their images are copied, and never for longer.

A freeze outlives the process that made it, so it is written down before it is made, and whoever starts next thaws
(`Freezer.open`) before anybody is served. In a living process a timer thaws what takes too long: a stopped database
is an outage, and the copy is then given up as torn. Of a group all are frozen before the first is copied.

    <run dir>/freezes/<volume id>    the boot and the device (major:minor@disk sequence) that will be frozen
"""

import logging
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

from crust import errors, volumes
from crust.host import boot, devices, durable, filesystems, mounts

LIMIT_S = 60.0
_ENTRY_LIMIT_BYTES = 4096

_log = logging.getLogger(__name__)


class FrozenTooLong(errors.NotReady):
    """The copy took longer than a filesystem may stand still."""

    def __init__(self, volume_ids: Sequence[str], limit_s: float) -> None:
        super().__init__(
            f"{', '.join(volume_ids)} is not copied",
            why=f"its filesystem would have stood still for more than {limit_s:g} s",
            hint="unpublish it first, or keep the pool on xfs or btrfs, where a copy takes no time",
        )
        self.volume_ids = tuple(volume_ids)


@dataclass(frozen=True, slots=True)
class Freezable:
    """A filesystem that this host has mounted."""

    volume_id: volumes.VolumeId
    identity: volumes.DeviceIdentity
    mountpoint: str


@dataclass(slots=True)
class _Standstill:
    """What is frozen at this moment. The timer and the copier meet here."""

    guard: threading.Lock = field(default_factory=threading.Lock)
    frozen: list[tuple[Freezable, filesystems.Freeze]] = field(default_factory=list)
    expired: bool = False


class Freezer:
    """Freezes and thaws. `limit_s` is how long anything may stand still."""

    def __init__(self, run_dir: str, *, limit_s: float = LIMIT_S) -> None:
        self._directory = os.path.join(run_dir, "freezes")
        self._limit_s = limit_s

    def open(self) -> None:
        """Thaw what an earlier life left frozen. Once, before the first call."""
        durable.make_directory(self._directory, 0o700)
        durable.sweep(self._directory)
        for name in os.listdir(self._directory):
            self._thaw_left(volumes.VolumeId(name))

    @contextmanager
    def frozen(self, members: Sequence[Freezable]) -> Iterator[None]:
        """All of `members` stand still while the block runs; blocks its thread.

        Raises `FrozenTooLong` afterwards if they did not: what was copied is to be thrown away. Raises
        `freezing.AlreadyFrozen` when somebody else froze one.
        """
        if not members:
            yield
            return
        still = _Standstill()
        timer = threading.Timer(self._limit_s, self._expire, [still])
        with ExitStack() as stack:
            stack.callback(self._release, still)
            timer.start()
            stack.callback(timer.cancel)
            for member in members:
                self._freeze(still, member)
            yield
        if still.expired:
            raise FrozenTooLong([each.volume_id for each in members], self._limit_s)

    def _freeze(self, still: _Standstill, member: Freezable) -> None:
        entry = f"{boot.boot_id()} {member.identity}\n".encode()
        # Not synced: a reboot thaws everything.
        durable.publish(self._path(member.volume_id), entry, survives_power_cut=False)
        try:
            freeze = filesystems.Freeze(member.mountpoint)
        except errors.CrustError:
            durable.remove(self._path(member.volume_id), survives_power_cut=False)
            raise
        with still.guard:
            still.frozen.append((member, freeze))
            expired = still.expired
        if expired:  # the timer was here before us
            self._release(still)

    def _expire(self, still: _Standstill) -> None:
        with still.guard:
            still.expired = True
        _log.error("a freeze took too long and was undone", extra={"limit_s": self._limit_s})
        self._release(still)

    def _release(self, still: _Standstill) -> None:
        with still.guard:
            failures = [err for each in still.frozen if (err := self._thaw(*each)) is not None]
            still.frozen.clear()
        if failures:
            raise failures[0]

    def _thaw(self, member: Freezable, freeze: filesystems.Freeze) -> errors.CrustError | None:
        try:
            freeze.thaw()
            durable.remove(self._path(member.volume_id), survives_power_cut=False)
        except errors.CrustError as err:
            _log.error("cannot thaw", extra={"volume_id": member.volume_id, "error": str(err)})
            return err
        return None

    def _thaw_left(self, volume_id: volumes.VolumeId) -> None:
        path = self._path(volume_id)
        text = durable.read(path, limit_bytes=_ENTRY_LIMIT_BYTES).decode("utf-8", "replace")
        boot_id, _, identity = text.strip().partition(" ")
        if boot_id == boot.boot_id():
            mount = _mount_of(identity)
            if mount is None:
                # It was unmounted meanwhile, which a frozen one can be: nothing here reaches it.
                _log.warning("not mounted any more, not thawed", extra={"volume_id": volume_id})
            else:
                filesystems.thaw(mount.target)
                _log.warning("thawed what was left frozen", extra={"volume_id": volume_id})
        durable.remove(path, survives_power_cut=False)

    def _path(self, volume_id: str) -> str:
        return os.path.join(self._directory, volume_id)


def _mount_of(identity: str) -> mounts.Mount | None:
    """A mount of the very device that was meant; its numbers may be another's by now."""
    numbers = re.fullmatch(r"(\d+):(\d+)@\d+", identity)
    if numbers is None:
        return None
    for mount in mounts.of_device(int(numbers[1]), int(numbers[2])):
        with suppress(errors.CrustError):
            if str(devices.identify(mount.source)) == identity:
                return mount
    return None
