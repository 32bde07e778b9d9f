"""What sandboxes do with one volume, as the proxy's events report it.

A sandbox may be over before anybody asks for the volume's state, so `crust try` goes by the events, from before the
publish on. Only if the proxy had to drop some is the state asked for.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc.aio

from crust import errors
from crust.cli import asking
from crust.wire.v1 import inspect_pb2

Shown = Callable[[str], None]
State = Callable[[], Awaitable[inspect_pb2.DeferredVolume]]

_SENTENCES = {
    "claimed": "claimed by {}",
    "mounted": "mounted in {}",
    "failed": "failed in {}",
    "released": "released by {}",
}


class EventsEnded(errors.PeerUnavailable):
    """The proxy ended the stream of events."""

    def __init__(self) -> None:
        super().__init__(
            "what sandboxes do with the volume is not known",
            why="the proxy ended its events: it stops, or is replaced by another process",
            hint="try again when the proxy serves",
        )


class SandboxEvents:
    """The events of the volume at `target`. `show` gets a sentence for each."""

    def __init__(
        self,
        stream: "grpc.aio.UnaryStreamCall[inspect_pb2.WatchRequest, inspect_pb2.Event]",
        target: str,
        state: State,
        show: Shown,
    ) -> None:
        self._stream = stream
        self._target = target
        self._state = state
        self._show = show

    async def claimed(self) -> None:
        """Return when a sandbox has claimed the volume. Raises `EventsEnded`."""
        while True:
            kind = await self._next()
            if kind == "claimed":
                return
            if kind == "missed" and (await self._state()).sandbox_id:
                return

    async def released(self) -> None:
        """Return when no sandbox has the volume any more. Raises `EventsEnded`."""
        while True:
            kind = await self._next()
            if kind == "released":
                return
            if kind == "missed" and not (await self._state()).sandbox_id:
                return

    async def _next(self) -> str:
        event = await self._stream.read()
        if not isinstance(event, inspect_pb2.Event):  # EOF
            raise EventsEnded
        if event.target_path == self._target and event.kind in _SENTENCES:
            self._show(_SENTENCES[event.kind].format(event.message))
        return event.kind if event.target_path in ("", self._target) else ""


@asynccontextmanager
async def watching(
    inspect: asking.Stub, target: str, state: State, show: Shown
) -> AsyncIterator[SandboxEvents]:
    """The events from now on. `state` asks for the volume as it is."""
    stream = inspect.Watch(inspect_pb2.WatchRequest())
    try:
        await stream.initial_metadata()
        yield SandboxEvents(stream, target, state, show)
    finally:
        stream.cancel()
