"""Freezes filesystems of this host: for `freezer`, which notes and orders the freezes.

While the process lives, a timer ends a freeze that takes too long: a thread of its own, so that it does not wait for
the copying thread or the loop. The intent is on disk before each freeze: by it a start finds a freeze of a killed
process, mounted or not.

    <run dir>/freezes/<volume id>    one line: the boot, and the subject of the freeze

The subject is a device (major:minor@disk sequence) whose filesystem this host has mounted, or "guest:" and the target
path of a deferred publish. The line is removed when the thaw is confirmed. A reboot thaws everything, so nothing is
synced, and lines of another boot are ignored. No path holds a NUL: a later version may add text to a line after a
NUL, which this version does not read and keeps until the thaw.
"""

import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from crust.blockdriver.engines.pool_access import NodeAccess
from crust.blockdriver.host import device_mounts, fsfreeze
from crust.core import errors, volumes
from crust.host.block import devices, holders, signatures, users
from crust.host.files import durable
from crust.host.filesystems import mkfs
from crust.host.mounts import mountinfo
from crust.host.process import syscalls

_LIMIT_BYTES = 8192
_GUEST = "guest:"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Intent:
    """One line. Either `identity`, as text, or `target` is empty."""

    volume_id: volumes.VolumeId
    identity: str = ""
    target: str = ""


class Intents:
    """The lines below one directory. Every method blocks; one call per volume at a time."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._directory = os.path.join(run_dir, "freezes")

    def open(self) -> Iterator[Intent]:
        """The intents of drivers that died in this boot: their subjects may be frozen. Creates the directories.

        At the end it raises the error of an intent that is not seen: the writers of other volumes do not wait for it.
        """
        durable.make_directories(self._run_dir, 0o700)
        durable.make_directory(self._directory, 0o700)
        durable.remove_temporary_files(self._directory)
        unseen: errors.CrustError | None = None
        for name in os.listdir(self._directory):
            try:
                intent = self.find(volumes.VolumeId(name))
            except (durable.UnreadableFile, durable.UntrustedFile) as err:  # no driver wrote it
                extra = {"volume_id": name, "error": err}
                _log.error("a freeze intent cannot be read", extra=extra)
                continue
            except errors.CrustError as err:
                unseen = err
                continue
            if intent is not None:
                yield intent
        if unseen is not None:
            raise unseen

    def note(self, intent: Intent) -> None:
        """Record an intent, before the freeze."""
        subject = intent.identity or f"{_GUEST}{intent.target}"
        line = f"{syscalls.boot_id()} {subject}\n".encode()
        durable.write_file(self._path(intent.volume_id), line, survives_power_cut=False)

    def forget(self, volume_id: volumes.VolumeId) -> None:
        """Remove an intent, after the thaw; absent is a success."""
        durable.remove(self._path(volume_id), survives_power_cut=False)

    def find(self, volume_id: volumes.VolumeId) -> Intent | None:
        """The intent of a volume whose thaw is not confirmed; None if there is none of this boot."""
        data = durable.find(self._path(volume_id), limit_bytes=_LIMIT_BYTES)
        if data is None:
            return None
        boot_id, _, subject = data.decode("utf-8", "replace").removesuffix("\n").partition(" ")
        if boot_id != syscalls.boot_id():
            self.forget(volume_id)
            return None
        subject = subject.partition("\0")[0]
        if subject.startswith(_GUEST):
            return Intent(volume_id, target=subject.removeprefix(_GUEST))
        return Intent(volume_id, identity=subject)

    def _path(self, volume_id: volumes.VolumeId) -> str:
        return os.path.join(self._directory, volume_id)


@dataclass(frozen=True, slots=True)
class OnHost:
    """A filesystem that this host has mounted."""

    volume_id: volumes.VolumeId
    identity: volumes.DeviceIdentity
    mountpoint: str


class ThawedEarly(errors.PeerUnavailable):
    def __init__(self, volume_id: str, why: str) -> None:
        super().__init__(f"{volume_id} is not copied", why=why)


def _still_frozen(volume_id: volumes.VolumeId, cause: errors.CrustError) -> errors.CrustError:
    error = errors.PeerUnavailable.named(
        "StillFrozen",
        f"{volume_id} is not copied",
        why=f"its filesystem is frozen by this or an earlier copy, and the thaw failed: {cause}",
    )
    error.__cause__ = cause
    return error


@dataclass(eq=False)
class HostFreezes:
    """The filesystems that are frozen for one copy, from the first `freeze` on for at most so many seconds."""

    _limit_s: float
    _guard: threading.Lock = field(default_factory=threading.Lock, init=False)
    _frozen: dict[volumes.VolumeId, fsfreeze.Freeze] = field(default_factory=dict, init=False)
    _failed: dict[volumes.VolumeId, errors.CrustError] = field(default_factory=dict, init=False)
    _thawed_early: set[volumes.VolumeId] = field(default_factory=set, init=False)
    _timer: threading.Timer | None = field(default=None, init=False)
    _has_ended: bool = field(default=False, init=False)

    def close(self, *, is_late: bool = False) -> None:
        """Thaw everything, even a filesystem that a thread is still freezing."""
        if self._timer is not None:
            self._timer.cancel()
        with self._guard:
            self._has_ended = True
            for volume_id in tuple(self._frozen):
                self._thaw(volume_id)
        if is_late:
            _log.error("a freeze took too long and was undone", extra={"limit_s": self._limit_s})

    def freeze(self, member: OnHost) -> None:
        """Raises AlreadyFrozen if another program froze it."""
        if self._timer is None:
            self._timer = threading.Timer(self._limit_s, self.close, kwargs={"is_late": True})
            self._timer.start()
        freeze = fsfreeze.Freeze(member.mountpoint)
        with self._guard:
            self._frozen[member.volume_id] = freeze
            if self._has_ended:  # the timer was faster
                self._thaw(member.volume_id)

    def thaw(self, member: OnHost) -> errors.CrustError | None:
        """Thaw it, if it is frozen. Returns the error if it was thawed too early for its copy to count; raises
        StillFrozen, also after a thaw of the timer that failed.

        The kernel tells a thaw by another program, unless that has frozen the filesystem again.
        """
        with self._guard:
            self._thaw(member.volume_id)
        if member.volume_id in self._failed:
            raise self._failed[member.volume_id]
        if member.volume_id in self._thawed_early:
            return ThawedEarly(
                member.volume_id,
                f"another program thawed {member.mountpoint} before the copy ended",
            )
        if not self._has_ended:
            return None
        return errors.NotReady.named(
            "FrozenTooLong",
            f"{member.volume_id} is not copied",
            why=f"its filesystem would have been frozen for more than {self._limit_s:g} s",
        )

    def _thaw(self, volume_id: volumes.VolumeId) -> None:
        freeze = self._frozen.pop(volume_id, None)
        try:
            if freeze is not None and not freeze.thaw():
                self._thawed_early.add(volume_id)
        except errors.CrustError as err:
            self._failed[volume_id] = _still_frozen(volume_id, err)


def thaw(intent: Intent, access: NodeAccess | None = None) -> bool:
    """Thaw the filesystem of an intent that stands; returns whether nothing is left to thaw.

    Without the engine's `access` only a mounted filesystem; with it also an unmounted or covered one: a frozen
    filesystem stays alive without a path. Raises StillFrozen.
    """
    extra = {"volume_id": intent.volume_id}
    try:
        mount = _mount_of(intent.identity)
        if mount is not None:
            fsfreeze.thaw(mount.target)
            _log.warning("thawed a filesystem that was left frozen", extra=extra)
            return True
        if access is None:
            return False
        attachment = access.host_device(intent.volume_id)
        source = attachment.device if attachment else None
        if source is None or str(source.identity) != intent.identity:
            return True  # the device is gone, and its filesystem too
        if not users.is_held(source):
            return True  # no filesystem has it open
        probed = signatures.probe(source.path)
        # another format's bytes hide the type of the filesystem that may hold the device
        types = (probed.type,) if isinstance(probed, signatures.Filesystem) else mkfs.SUPPORTED
        for fs_type in types:
            # a guest, a tool or a filesystem of another type has it now
            with suppress(holders.DeviceInUse):
                fsfreeze.thaw_unmounted(source.path, fs_type)
                _log.warning(
                    "thawed a filesystem that was left frozen without a mount", extra=extra
                )
                break
    except errors.CrustError as err:
        raise _still_frozen(intent.volume_id, err) from err
    return True


def settle(intents: Intents, volume_id: volumes.VolumeId, access: NodeAccess) -> None:
    """Before a freeze: thaw what an earlier one has left frozen, so that no other program did. Raises StillFrozen."""
    try:
        intent = intents.find(volume_id)
    except errors.CrustError as err:
        raise _still_frozen(volume_id, err) from err
    if intent is not None and not intent.target:
        thaw(intent, access)


def _mount_of(identity: str) -> mountinfo.Mount | None:
    """A visible mount of the device with this identity; its numbers may have been reused."""
    numbers = re.fullmatch(r"(\d+):(\d+)@\d+", identity)
    if numbers is None:
        return None
    major, minor = int(numbers[1]), int(numbers[2])
    device = devices.of_number(os.makedev(major, minor))
    if device is None or str(device.identity) != identity:
        return None
    return next(filter(device_mounts.is_visible, mountinfo.of_devices({(major, minor)})), None)
