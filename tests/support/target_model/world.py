"""The world of one volume and one target: the disk, the kernel, the driver and the sandbox."""

from dataclasses import dataclass, replace

from crust.core import errors, volumes
from crust.handoff.claims import Claim, State
from crust.handoff.entry import Entry
from crust.proxy.target import (
    MountStack,
    TargetState,
    Wanted,
)
from tests.support.records import records

RECORD = records.a_record().replaced(request="1" * 64)
OTHERS = RECORD.replaced(volume_id="vol-other")

WANTED = Wanted(
    RECORD.key,
    RECORD.target,
    volumes.MountAccess(fs_type="ext4"),
    (),
    readonly=True,
    digest="1" * 64,
)

ARGS = RECORD.replaced(request="2" * 64)
HELD = Claim("box", "kata", State.MOUNTED, "", 7, None, live=True)
EMPTY = replace(RECORD.mount, format=volumes.GuestFormat(), readonly=False)

ENTRIES = {
    "same": Entry(RECORD.digest, "/e", RECORD.replaced(replace(RECORD.mount, readonly=True))),
    "args": Entry(RECORD.digest, "/e", ARGS),
    "vol": Entry(RECORD.digest, "/e", OTHERS),
    "bad": Entry(RECORD.digest, "/e", None, errors.Corrupt("damaged")),
}


@dataclass(frozen=True)
class World:
    """The disk, the kernel, the driver and the sandbox."""

    entry: str = ""
    """A key of `ENTRIES`, or "gone": hidden, and not deleted yet."""
    stack: MountStack = MountStack.CLEAR
    driver: bool = False
    """Whether the driver has the volume published."""
    held: bool = False
    late: bool = False
    """Whether the driver is still at work on a publish that nobody waits for."""
    blank: bool = True
    """Whether the volume, which was created empty, has no filesystem; the handler's guests make none."""
    tool: bool = False
    """Whether mkfs runs, and nobody waits for it."""

    def seen(self) -> TargetState:
        if self.tool:
            return TargetState(
                stack=MountStack.UNSEEN, problem=errors.PeerUnavailable("a tool runs")
            )
        entry = ENTRIES.get(self.entry)
        if entry is not None and self.held:
            entry = replace(entry, claim=HELD)
        return TargetState(entry, self.stack)
