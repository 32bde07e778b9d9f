"""The filesystems of fake devices: which are blank, and what was made on them. The locks of tools are real ones."""

import contextlib
from pathlib import Path

from crust.core import volumes
from crust.host.files.locks import ToolLocks
from crust.host.filesystems import format_decision
from crust.host.filesystems.format_decision import Action
from crust.proxy.filesystems import Filesystems
from tests.support.drivers.fake_driver import Gate


class FakeFilesystems(Filesystems):
    """Every device is blank until its filesystem was made."""

    def __init__(self, run_dir: str) -> None:
        super().__init__(ToolLocks(Path(run_dir, "tools.lock")))
        self.made: dict[str, tuple[str, volumes.GuestFormat]] = {}
        """By device."""
        self.looks = 0
        self.gate: Gate | None = None
        """mkfs waits here."""
        self.error: Exception | None = None
        """mkfs fails."""
        self.sizes_bytes: dict[str, int] = {}
        """Of filesystems, by device; others fill theirs."""
        self.left: list[contextlib.ExitStack] = []
        """A tool that fails leaves its lock here, as one that nothing can end."""

    async def make_if_blank(
        self,
        key: volumes.VolumeKey,
        source: volumes.BlockSource,
        mount: volumes.DeferredMount,
        wanted: volumes.GuestFormat,
    ) -> None:
        self.looks += 1
        lock = contextlib.ExitStack()
        lock.enter_context(self.locks.taking(str(key)))
        if self.gate is not None:
            await self.gate.stop()
        if self.error is not None:
            self.left.append(lock)
            raise self.error
        with lock:
            if source.path not in self.made:
                if mount.readonly:
                    format_decision.check_readable(str(key), Action.MAKE)
                self.made[source.path] = (mount.fs_type, wanted)

    def filesystem_bytes(self, device: str, fs_type: str) -> int:
        return self.sizes_bytes.get(device, 2**63)
