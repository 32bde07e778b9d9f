"""One call that is being served: what its caller sent beside the request, and what goes back beside the answer."""

import time
from collections.abc import Awaitable, Callable

from crust.rpc.status import Metadata

Send = Callable[[Metadata], Awaitable[None]]


class Call:
    """A call of `method` (`/csi.v1.Node/NodeStageVolume`) with the metadata of its caller, who waits `left_s`.

    `send` sends what comes before the answer; without it the caller reads `initial`.
    """

    __slots__ = ("_ends_s", "_metadata", "_send", "initial", "method", "trailing")

    def __init__(
        self,
        method: str,
        metadata: Metadata = (),
        left_s: float | None = None,
        send: Send | None = None,
    ) -> None:
        self.method = method
        self._metadata = metadata
        self._ends_s = None if left_s is None else time.monotonic() + left_s
        self._send = send
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
        if self._send is not None:
            await self._send(initial)
