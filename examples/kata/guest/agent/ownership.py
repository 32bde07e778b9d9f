"""One application of an fsGroup to a volume, in a thread of its own, for as long as it takes.

The host asks every few seconds, and each answer says how many entries are done: it gives up when that number does not
change any more, not when the tree is large. A freeze may run between two batches. If the agent dies, the walk ends;
the next agent starts it again, and only reads the entries that have the group already.
"""

from __future__ import annotations

import contextlib
import itertools
import threading

from . import fs_group, protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .freeze import VolumeFreeze

_BATCH = 256
_CANCEL_S = 30.0


class GroupChange:
    """The walk over one volume. It begins when it is made."""

    def __init__(self, path: str, gid: int, policy: str, freeze: VolumeFreeze) -> None:
        self.wanted = (gid, policy)
        self._freeze = freeze
        self._visited = 0
        self._cancelled = False
        self._failure: protocol.Fault | None = None
        walk = fs_group.walk(path, gid, policy, read_only=False)
        self._thread = threading.Thread(target=self._run, args=(walk,), daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether it ended with a failure."""
        return self._failure is not None

    def progress(self, wait_s: float) -> dict[str, Any]:
        """How far it is, after `wait_s` at most if it has not ended. Faults: its own."""
        self._thread.join(wait_s)
        if self._failure is not None:
            raise self._failure
        return {"done": not self._thread.is_alive(), "owned_entries": self._visited}

    def cancel(self) -> None:
        """End it, so that the volume can be unmounted. Faults: busy if it hangs in the kernel."""
        self._cancelled = True
        self._thread.join(_CANCEL_S)
        if self._thread.is_alive():
            raise protocol.Fault(
                "busy", "its fsGroup is being applied, and the disk does not answer"
            )

    def _run(self, walk: Any) -> None:
        more = True
        try:
            with contextlib.closing(walk):
                while more and not self._cancelled:
                    more = self._batch(walk)
            if more:
                self._failure = protocol.Fault("busy", "fsGroup was ended before it was applied")
        except protocol.Fault as fault:
            self._failure = fault
        except OSError as err:
            self._failure = protocol.fault_of(err, "applying fsGroup")

    def _batch(self, walk: Any) -> bool:
        """Whether there may be more."""
        with self._freeze.changing():
            done = sum(1 for _ in itertools.islice(walk, _BATCH))
        self._visited += done
        return done == _BATCH
