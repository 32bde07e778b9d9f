"""A node with one deferred volume, as the model of `node` knows it.

The devices are A and B. The driver answers A to the first publish of the deferred volume, and may answer B to a
repeated one; another volume, raw, is on B. Two sandboxes have a VM each, with a keeper (keeper and standby are one).
"""

from typing import NamedTuple, Self

DEVICES = ("A", "B")
LIVING = ("up", *DEVICES)
UNPUBLISH = 3
"""The holder of the claim lock that is no sandbox."""


class Sandbox(NamedTuple):
    """A sandbox, its VM and its keeper."""

    vm: str = ""
    """Not started, "up", the device that it has open, "ended", or "reused": its pid is another process's."""
    hold: str = ""
    """The device that the keeper has open with O_EXCL."""
    granted: str = ""
    """The device that the runtime was told, and that the VM will open."""
    socket: bool = False
    """Whether the keeper's socket file is there."""
    in_flight: str = ""
    """The device that still gets writes of the VM, which has ended."""

    @property
    def lives(self) -> bool:
        """Whether the VM runs."""
        return self.vm in LIVING


class State(NamedTuple):
    """The node between two steps. Sandboxes have the numbers 1 and 2; 0 is none."""

    entry: str = ""
    """The device of the published entry."""
    lock: int = 0
    """The holder of the entry's claim lock: a sandbox's keeper, or `UNPUBLISH`."""
    claim: int = 0
    """The sandbox of claim.json; 0: there is none, or it names no process."""
    boxes: tuple[Sandbox, Sandbox] = (Sandbox(), Sandbox())
    bridge: bool = True
    """Whether the bridge to the runtime runs."""
    host: bool = False
    """Whether the host has A mounted for writing."""
    raw: str = ""
    """The raw volume on B: "bound", or "open" in its pod."""
    driver_done: bool = False
    """Whether the driver has answered the unpublish that has the lock."""
    in_guest: bool = False
    """Whether a guest may have written to the deferred volume."""
    moved: bool = False
    """Whether the entry was moved away by hand once."""
    lost: bool = False
    """Whether claim.json was lost once."""

    def box(self, number: int) -> Sandbox:
        """A sandbox by its number."""
        return self.boxes[number - 1]

    def with_box(self, number: int, box: Sandbox) -> Self:
        """The state with another sandbox in this one's place."""
        boxes = (box, self.boxes[1]) if number == 1 else (self.boxes[0], box)
        return self._replace(boxes=boxes)

    def unlocked(self, number: int) -> Self:
        """The state without the lock, if this sandbox had it."""
        return self._replace(lock=0) if self.lock == number else self

    def writers(self, device: str) -> list[str]:
        """The writers of a device."""
        found = ["a VM" for box in self.boxes if box.vm == device]
        found += ["a VM that ended" for box in self.boxes if box.in_flight == device]
        if device == "A" and self.host:
            found.append("the host")
        if device == "B" and self.raw == "open":
            found.append("a raw pod")
        return found

    def is_held(self, device: str) -> bool:
        """Whether an exclusive open is refused."""
        is_mounted = device == "A" and self.host
        return is_mounted or any(box.hold == device for box in self.boxes)

    @property
    def is_given_back(self) -> bool:
        """Whether nothing is left of the volumes."""
        is_used = self.entry or self.lock or self.host or self.raw
        return not is_used and all(not box.lives and not box.hold for box in self.boxes)
