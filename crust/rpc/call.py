"""One call, served or made: what its caller sends beside the request, and what goes back beside the answer."""

import time
from collections.abc import Awaitable, Callable

from crust.rpc.status import Metadata

Begun = Callable[[Metadata], Awaitable[None]]


class Call:
    """A call of `method` (`/csi.v1.Node/NodeStageVolume`) with the metadata of its caller, who waits `left_s`.

    `begun` is called with what comes before the answer; without it the caller reads `initial`. `waits`: the caller
    waits for a peer that is absent.
    """

    __slots__ = ("_begun", "_ends_s", "_metadata", "initial", "method", "trailing", "waits")

    def __init__(
        self,
        method: str,
        metadata: Metadata = (),
        left_s: float | None = None,
        begun: Begun | None = None,
        *,
        waits: bool = False,
    ) -> None:
        self.method = method
        self._metadata = metadata
        self._ends_s = None if left_s is None else time.monotonic() + left_s
        self._begun = begun
        self.waits = waits
        self.initial: Metadata = ()
        self.trailing: Metadata = ()
        """What goes after the answer."""

    def invocation_metadata(self) -> Metadata:
        """The caller's metadata, without that of its connection."""
        return self._metadata

    def time_remaining(self) -> float | None:
        """How long the caller still waits, in seconds; None: without a limit."""
        return None if self._ends_s is None else max(0.0, self._ends_s - time.monotonic())

    async def begin(self, initial: Metadata = ()) -> None:
        """Let the caller know that its call has begun, before the first answer."""
        self.initial = initial
        if self._begun is not None:
            await self._begun(initial)
