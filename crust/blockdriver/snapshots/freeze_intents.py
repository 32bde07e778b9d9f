"""Freeze intents, on disk before each freeze: a freeze outlives the process that made it.

    <run dir>/freezes/<volume id>    one line: the boot, and what will be frozen

That is a device (major:minor@disk sequence) whose filesystem this host has mounted, or "guest:" and the target path
of a deferred publish. The line is removed when the thaw is confirmed. A reboot thaws everything, so nothing is
synced, and lines of another boot are ignored. No path holds a NUL: a later version may add to a line after one, and
what it added is not read and stays until the thaw.
"""

import logging
import os
from dataclasses import dataclass

from crust.core import errors, volumes
from crust.host.files import durable
from crust.host.process import sysfs

_log = logging.getLogger(__name__)
_LIMIT_BYTES = 8192
_GUEST = "guest:"


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

    def open(self) -> tuple[Intent, ...]:
        """What a driver that died in this boot may have left frozen. Creates the directories."""
        durable.make_directory(self._run_dir, 0o700)
        durable.make_directory(self._directory, 0o700)
        durable.remove_temporary_files(self._directory)
        found = (self._read(volumes.VolumeId(name)) for name in os.listdir(self._directory))
        return tuple(each for each in found if each is not None)

    def note(self, intent: Intent) -> None:
        """Record an intent, before the freeze."""
        what = intent.identity or f"{_GUEST}{intent.target}"
        line = f"{sysfs.boot_id()} {what}\n".encode()
        durable.publish(self._path(intent.volume_id), line, survives_power_cut=False)

    def forget(self, volume_id: volumes.VolumeId) -> None:
        """Remove an intent, after the thaw; absent is a success."""
        durable.remove(self._path(volume_id), survives_power_cut=False)

    def _read(self, volume_id: volumes.VolumeId) -> Intent | None:
        try:
            data = durable.read(self._path(volume_id), limit_bytes=_LIMIT_BYTES)
            boot_id, _, what = data.decode("utf-8", "replace").removesuffix("\n").partition(" ")
            if boot_id != sysfs.boot_id():
                self.forget(volume_id)
                return None
        except errors.CrustError as err:  # the writers of other volumes must not wait for this one
            _log.error(
                "a freeze intent cannot be read", extra={"volume_id": volume_id, "error": err}
            )
            return None
        what = what.partition("\0")[0]
        if what.startswith(_GUEST):
            return Intent(volume_id, target=what.removeprefix(_GUEST))
        return Intent(volume_id, identity=what)

    def _path(self, volume_id: volumes.VolumeId) -> str:
        return os.path.join(self._directory, volume_id)
