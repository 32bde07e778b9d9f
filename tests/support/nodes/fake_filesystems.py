"""The filesystems of fake devices: which are blank, and what was made on them. The locks of tools are real ones."""

import contextlib
from pathlib import Path

from crust.core import errors, volumes
from crust.handoff.record import Record
from crust.host.files.locks import ToolLocks
from crust.host.filesystems import format_decision
from crust.host.filesystems.format_decision import Action
from crust.host.filesystems.superblocks import Superblock
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
        self.grown: list[str] = []
        """Devices, by each growth."""
        self.sizes_bytes: dict[str, int] = {}
        """Of filesystems, by device; others fill theirs."""
        self.unreplayed: set[str] = set()
        """Devices whose log waits for its replay."""
        self.left: list[contextlib.ExitStack] = []
        """A tool that fails leaves its lock here, as one that nothing can end."""

    async def make_if_blank(
        self,
        key: volumes.VolumeKey,
        source: volumes.BlockSource,
        mount: volumes.DeferredMount,
        wanted: volumes.GuestFormat,
        guest_kernel: str,
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

    async def grow(self, record: Record) -> None:
        self.grown.append(record.device)
        if self.error is None:
            self.sizes_bytes.pop(record.device, None)

    def check_log(self, record: Record) -> None:
        if record.readonly and record.device in self.unreplayed:
            raise errors.NotReady.named("LogNotReplayed", "its log is to be replayed")

    def superblock(self, device: str, fs_type: str) -> Superblock:
        return Superblock(1, self.sizes_bytes.get(device, 2**63), clean=True, uuid="")
