"""The publishes and unpublishes that drivers are carrying out now, by target path.

A driver that implements KEP-2857 itself calls RuntimeStageVolume in its NodePublishVolume and RuntimeUnstageVolume in
its NodeUnpublishVolume, with the target path alone. If the proxy serves its CSI socket, the CO's call says which
volume that is. What such a driver stages is then the CO's volume: unpublish, expansion and the refusal to unstage
find it by the CO's own id.

A call that failed is remembered: if the CO gave up, its driver may still be at work, and stages later.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from crust import volumes

_ABANDONED_MAX = 1024
STAGED = volumes.DriverName("runtime-api.crust.dev")
"""The driver name of what is staged by a driver that the proxy does not serve."""


@dataclass(eq=False, slots=True)
class PublishCall:
    """A NodePublishVolume that a driver is carrying out.

    `handler` is the one that the volume context names. `guarded`: the proxy mounted the guard before, and it is the
    proxy's to remove if the call fails.
    """

    key: volumes.VolumeKey
    handler: volumes.HandlerName | None
    readonly: bool
    guarded: bool
    _running: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    @contextmanager
    def staging(self) -> Iterator[None]:
        """The driver stages or unstages while the block runs: the call does not end before."""
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def settled(self) -> None:
        """Wait until nothing is staged or unstaged."""
        while self._running:
            await self._idle.wait()


class DriverCalls:
    """The calls of all drivers."""

    def __init__(self) -> None:
        self._publishing: dict[str, PublishCall] = {}
        self._abandoned: dict[str, PublishCall] = {}
        self._unpublishing: set[str] = set()

    @asynccontextmanager
    async def publishing(self, target: str, call: PublishCall) -> AsyncIterator[None]:
        """A driver carries the publish out while the block runs. One at a time per target.

        If the block fails, the call is remembered until the target is published again or unpublished.
        """
        self._abandoned.pop(target, None)
        there = self._publishing.setdefault(target, call)
        try:
            yield
        except BaseException:
            self._remember(target, call)
            raise
        finally:
            if there is call:
                del self._publishing[target]
            await call.settled()

    @contextmanager
    def unpublishing(self, target: str) -> Iterator[None]:
        """A driver carries an unpublish of a published volume out while the block runs."""
        self._abandoned.pop(target, None)
        self._unpublishing.add(target)
        try:
            yield
        finally:
            self._unpublishing.discard(target)

    def publish_at(self, target: str) -> PublishCall | None:
        """The publish that is carried out at the target."""
        return self._publishing.get(target)

    def abandoned_at(self, target: str) -> PublishCall | None:
        """The publish that failed, and that the driver may still carry out, because its caller gave up."""
        return self._abandoned.get(target)

    def is_unpublishing(self, target: str) -> bool:
        """Whether the proxy itself is removing the entry."""
        return target in self._unpublishing

    def _remember(self, target: str, call: PublishCall) -> None:
        self._abandoned[target] = call
        if len(self._abandoned) > _ABANDONED_MAX:
            del self._abandoned[next(iter(self._abandoned))]
