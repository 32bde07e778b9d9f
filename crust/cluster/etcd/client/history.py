"""Whether the store still is the one that was read before.

An etcd that was restored from a backup, or was lost and started empty, has the addresses of the old one, and often
its cluster's id, which comes from names and addresses. But each answer has a revision, and in one history no answer
has a smaller one than an answer that was there before it was asked for. So a smaller one, or another cluster's id,
proves that what was written last is gone: whoever remembers anything of the store forgets it.

It proves nothing if the revision has passed the remembered one before this process asks again. So who has keys of its
own in the store compares those too (`node_side`), and calls `is_lost`.
"""

import asyncio
import logging
from dataclasses import dataclass

from crust.wire.etcd.v3 import etcd_pb2 as pb

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Position:
    """What is known of the history when a request is sent."""

    losses: int
    revision: int


class History:
    """What one client has seen."""

    def __init__(self) -> None:
        self.losses = 0
        """How often the store had lost what was read of it."""
        self._cluster_id = 0
        self._revision = 0
        self._lost = asyncio.Event()

    @property
    def position(self) -> Position:
        """Before a request is sent."""
        return Position(self.losses, self._revision)

    def seen(self, header: pb.ResponseHeader, sent_at: Position) -> None:
        """Take the header of the answer to a linearizable request that was sent at `sent_at`."""
        if sent_at.losses != self.losses:
            return
        if self._cluster_id not in (0, header.cluster_id):
            self.is_lost(
                f"another cluster answers, {header.cluster_id:x} and not {self._cluster_id:x}"
            )
        elif header.revision < sent_at.revision:
            self.is_lost(f"its revision is {header.revision}, and was {sent_at.revision} before")
        self._cluster_id = header.cluster_id
        self._revision = max(self._revision, header.revision)

    def is_lost(self, why: str) -> None:
        """What was read before is of another history."""
        self.losses += 1
        self._cluster_id = self._revision = 0
        extra = {"why": why, "hint": "docs/multi-node.md, Restore etcd from a backup"}
        _log.warning(
            "the store has lost its latest history: it was restored, or is new", extra=extra
        )
        self._lost.set()
        self._lost = asyncio.Event()

    async def lost(self, since: int) -> None:
        """Return when there were more than `since` losses."""
        while self.losses <= since:
            await self._lost.wait()
