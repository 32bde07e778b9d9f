"""Objects of one kind, kept known by list and watch.

A watch that lost events without an error, and one whose connection is dead without a word, are repaired by the next
list. What is kept of an object is the caller's choice; an answer from here is as old as the watch is late.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

from crust.core.supervised import Reports, supervised
from crust.kubernetes_api.api import (
    Kind,
    KubernetesApi,
    KubernetesApiUnavailable,
    VersionExpiredError,
)

_log = logging.getLogger(__name__)

_RELIST_S = 600.0
_WAIT_S = 5.0
"""external-attacher gives a detach 15 s."""
_PAUSES_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Before the next list, by how many watches have ended since a change was seen."""

Kept = TypeVar("Kept")


class Followed(Generic[Kind, Kept]):
    """What `keep` makes of each object, by `key`. `fields` is a field selector."""

    def __init__(
        self,
        api: KubernetesApi,
        kind: type[Kind],
        keep: Callable[[Kind], Kept],
        *,
        key: Callable[[Kind], str] = lambda found: found.name,
        fields: str = "",
    ) -> None:
        self._api = api
        self.kind = kind
        self._keep = keep
        self._key = key
        self._fields = fields
        self.known: dict[str, Kept] = {}
        """The objects, as the last list and the changes since have them; or as they were asked for directly."""
        self._failures = 0
        self._current = asyncio.Event()
        self.failure = ""
        """Why the objects are not known; empty: they are, or no answer has come yet."""

    async def is_known(self) -> bool:
        """Whether list and watch have not failed. Where they have, the next list is waited for, for a while."""
        try:
            async with asyncio.timeout(_WAIT_S):
                await self._current.wait()
        except TimeoutError:
            return False
        return True

    async def follow(self) -> None:
        """Keep the objects known, until cancelled. An API server that is away is logged and waited for."""
        while True:
            try:
                async with asyncio.timeout(_RELIST_S):
                    version = await self._list()
                    await self._watch(version)
            except TimeoutError:
                self._failures = 0
                continue
            except VersionExpiredError:
                pass
            except KubernetesApiUnavailable as error:
                self._lost(error)
                extra = {"error": error, "again_in_s": self._pause_s()}
                _log.warning(f"{self.kind.__name__} objects are not followed", extra=extra)
            except Exception as error:
                self._lost(error)
                raise
            pause_s = self._pause_s()
            self._failures += 1
            await asyncio.sleep(pause_s)

    def _lost(self, error: Exception) -> None:
        self._current.clear()
        self.failure = str(error) or type(error).__name__

    def _pause_s(self) -> float:
        return _PAUSES_S[min(self._failures, len(_PAUSES_S) - 1)]

    async def _list(self) -> str:
        objects, version = await self._api.listing(self.kind, fields=self._fields)
        self.known = {self._key(found): self._keep(found) for found in objects}
        self.failure = ""
        self._current.set()
        return version

    async def _watch(self, version: str) -> None:
        changes = self._api.watch(self.kind, version, fields=self._fields)
        async with contextlib.aclosing(changes):
            async for found, is_deleted in changes:
                self._failures = 0
                if is_deleted:
                    self.known.pop(self._key(found), None)
                else:
                    self.known[self._key(found)] = self._keep(found)


@contextlib.asynccontextmanager
async def following(health: Reports, *followed: Followed[Any, Any]) -> AsyncIterator[None]:
    """Follow the objects while the block runs."""
    async with contextlib.AsyncExitStack() as stack:
        for each in followed:
            await stack.enter_async_context(
                supervised(f"follow {each.kind.__name__} objects", each.follow, health)
            )
        yield
