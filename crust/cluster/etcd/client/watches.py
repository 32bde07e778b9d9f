"""Follows a range of keys: a listing, the changes since, and after any interruption a new listing.

Each new stream begins with a listing, and watches from the listing's revision. It does not resume where the last one
broke, although etcd can do that: after a wipe or a restore the revisions begin again, the cluster's id can be the
same one, and a revision that has been passed meanwhile cannot be told from one of the old history. A listing is
right in each of these cases, after a compaction too, and costs one read of a few kilobytes per node. The rule is:
whoever follows keeps nothing of what it had before a listing.

Silence proves nothing: a member without quorum, one that hangs, or a watch that was refused, are silent too. So a
progress request is sent now and then, and a stream that is silent all the same is replaced. Its answer's revision is
not used: before 3.4.25 it can be ahead of the events.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from crust import metrics
from crust.cluster.etcd.client import failures, writes
from crust.cluster.etcd.client.client import Broken, Client, Stream
from crust.cluster.etcd.client.failures import Failure, Next
from crust.cluster.etcd.client.methods import WATCH
from crust.cluster.protocol import StoreUnavailable
from crust.wire.etcd.v3 import etcd_pb2 as pb

_log = logging.getLogger(__name__)

_PAUSE_S = (0.1, 0.3, 1.0, 3.0)
"""Before each new attempt; the last one stays."""


@dataclass(frozen=True, slots=True)
class Listing:
    """All there is. What was known before is invalid."""

    revision: int
    kvs: Sequence[pb.KeyValue]


@dataclass(frozen=True, slots=True)
class Changes:
    """What has changed since, in the order of the changes."""

    events: Sequence[pb.Event]


@dataclass(frozen=True, slots=True)
class Silence:
    """After how many seconds a quiet watch is asked for a sign of life, and how long it has for it."""

    ask_after_s: float = 10.0
    answer_s: float = 5.0


USUAL = Silence()


Watching = Stream[pb.WatchRequest, pb.WatchResponse]


class Follower:
    """One range, followed for as long as somebody iterates."""

    def __init__(
        self, client: Client, key: bytes, end: bytes, *, what: str, silence: Silence = USUAL
    ) -> None:
        self._client = client
        self._key = key
        self._end = end
        self._what = what
        self._silence = silence
        self._reported = ""
        self.problem: StoreUnavailable | None = StoreUnavailable(what, "it was not read yet")
        """Why it is not followed now."""

    @property
    def is_connected(self) -> bool:
        """Whether it is followed now."""
        return self.problem is None

    async def follow(self) -> AsyncGenerator[Listing | Changes, None]:
        """A `Listing`, then `Changes`, and so on for ever."""
        attempts = 0
        while True:
            try:
                revision, kvs = await writes.listing(
                    self._client, self._key, self._end, what=self._what
                )
                async with self._client.stream(WATCH, what=self._what) as watching:
                    await self._begin(watching, revision)
                    self._connected()
                    attempts = 0
                    yield Listing(revision, kvs)
                    async with contextlib.aclosing(self._events(watching)) as changes:
                        async for events in changes:
                            yield Changes(events)
            except (Broken, StoreUnavailable) as problem:
                self._interrupted(problem)
            await asyncio.sleep(_PAUSE_S[min(attempts, len(_PAUSE_S) - 1)])
            attempts += 1

    async def _begin(self, watching: Watching, revision: int) -> None:
        """Watch what comes after `revision`. Raises `StoreUnavailable` if that is refused, and `Broken`."""
        request = pb.WatchCreateRequest(
            key=self._key, range_end=self._end, start_revision=revision + 1
        )
        limit = self._silence.answer_s
        await watching.write(pb.WatchRequest(create_request=request), limit)
        created = await watching.read(limit)
        if created.canceled:
            raise self._refused(created.cancel_reason)
        if (
            created.header.revision < revision
        ):  # restored since the listing, or a member that is behind
            why = "the member does not have yet, or not any more, what was listed"
            raise StoreUnavailable(self._what, why)

    async def _events(self, watching: Watching) -> AsyncGenerator[Sequence[pb.Event], None]:
        asking = asyncio.create_task(self._ask_for_progress(watching), name="etcd watch progress")
        try:
            while True:
                answer = await watching.read(self._silence.ask_after_s + self._silence.answer_s)
                if answer.canceled:  # compacted, among others: the next listing is of now
                    raise self._refused(answer.cancel_reason or "compacted")
                if answer.events:
                    yield answer.events
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _ask_for_progress(self, watching: Watching) -> None:
        """The stream's reader notices if it is not answered, so a failure here is not reported."""
        request = pb.WatchRequest(progress_request=pb.WatchProgressRequest())
        with contextlib.suppress(Broken):
            while True:
                await asyncio.sleep(self._silence.ask_after_s)
                await watching.write(request, self._silence.answer_s)

    def _refused(self, reason: str) -> StoreUnavailable:
        if "ermission" in reason:
            denied = f"the certificate's user may not do this: {self._client.user}"
            found = Failure(failures.StoreAccessDenied, denied, failures.GRANT, Next.NEVER)
        else:
            found = Failure(StoreUnavailable, f"the watch was ended: {reason[:200]}", "", Next.HERE)
        return found.kind(self._what, found.why, found.hint)

    def _connected(self) -> None:
        self.problem = None
        metrics.store_connected.set(1)
        if self._reported:
            self._reported = ""
            _log.info("the store is followed again")

    def _interrupted(self, problem: Broken | StoreUnavailable) -> None:
        """Say it once as long as nothing else is the matter."""
        if isinstance(problem, Broken):
            found = problem.failure
            self.problem = found.kind(self._what, str(problem), found.hint)
        else:
            self.problem = problem
        metrics.store_connected.set(0)
        if str(problem) != self._reported:
            self._reported = str(problem)
            _log.warning("the store is not followed now", extra={"error": problem})
