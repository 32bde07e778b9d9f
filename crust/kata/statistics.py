"""A volume's statistics as the guest's kernel counts them, by the HTTP socket of the sandbox's shim.

The shim asks the guest's agent, and gives up after a minute; a client that leaves does not end that. So a sandbox
has one request in flight, whoever waits for it, and a sandbox that hangs delays nobody else's. Between two containers
the device is not in the guest, and there are no statistics: then the last ones are returned, and the condition says
how old they are. The numbers are a guest's: they are checked here, and the proxy compares them with the device.
"""

import asyncio
import json
import os
import time
import urllib.parse
import weakref
from dataclasses import dataclass
from typing import Annotated

import pydantic

from crust.core import errors, volumes
from crust.handoff import claims
from crust.handoff.record import Record
from crust.handoff.store import Store
from crust.host.process import workers
from crust.kata.evidence import check_id
from crust.runtime_handler.service import Handler

_ANSWER_S = 4.0
"""How long a caller waits; the proxy gives a handler twice that."""
_SHIM_S = 70.0
"""How long a request may take: the shim's own limit is a minute."""
_ANSWER_BYTES = 64 * 1024
_KNOWN_MAX = 1024
_UNITS = {1: volumes.UsageUnit.BYTES, 2: volumes.UsageUnit.INODES}

_Number = Annotated[int, pydantic.Field(ge=0, lt=2**63)]


class _Usage(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)

    unit: int = 0
    total: _Number = 0  # zeros are left out
    used: _Number = 0
    available: _Number = 0


class _Answer(pydantic.BaseModel):
    usage: Annotated[tuple[_Usage, ...], pydantic.Field(max_length=8)]


@dataclass(frozen=True, slots=True)
class _Known:
    sandbox_id: str
    stats: volumes.VolumeStats
    at_s: float


class KataHandler(Handler):
    """What the proxy calls: statistics alone. `root` is where Kata's shims have their sockets."""

    def __init__(self, store: Store, root: str) -> None:
        self._store, self._root = store, root
        self._known: dict[str, _Known] = {}
        self._one_at_a_time: weakref.WeakValueDictionary[str, asyncio.Lock]
        self._one_at_a_time = weakref.WeakValueDictionary()
        self._requests: set[asyncio.Task[volumes.VolumeStats]] = set()

    async def close(self) -> None:
        """Leave the requests that run."""
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)

    async def get_stats(self, target: volumes.TargetPath) -> volumes.VolumeStats:
        """Those of now, or the last ones of the same sandbox. Raises `NotInSandbox`, `StatisticsUnavailable`."""
        record, sandbox_id = await workers.run(self._holder, target)
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await self._asked(sandbox_id, record)
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            known = self._known.get(record.digest)
            if known is not None and known.sandbox_id == sandbox_id:
                return _aged(known)
            raise errors.PeerUnavailable.named(
                "StatisticsUnavailable",
                f"the statistics of the volume at {target} cannot be had",
                why=f"the shim of sandbox {sandbox_id}: {str(error)[:300] or 'no answer in time'}",
                hint="retry while a container of the pod runs; if it stays so, the guest's agent hangs",
            ) from error

    def _holder(self, target: volumes.TargetPath) -> tuple[Record, str]:
        entry = self._store.read(target)
        if entry is None:
            raise claims.NotPublished(target)
        if entry.claim is None or not entry.live or not entry.claim.sandbox_id:
            raise errors.NotReady.named(
                "NotInSandbox",
                f"the volume at {target} has no statistics",
                why="no sandbox of Kata has it",
                hint="retry when its pod runs",
            )
        return entry.require(), entry.claim.sandbox_id

    async def _asked(self, sandbox_id: str, record: Record) -> volumes.VolumeStats:
        lock = self._one_at_a_time.setdefault(sandbox_id, asyncio.Lock())
        await lock.acquire()
        request = asyncio.create_task(self._request(sandbox_id, record), name="statistics")
        self._requests.add(request)

        def ended(of: asyncio.Task[volumes.VolumeStats]) -> None:
            lock.release()
            self._requests.discard(of)
            if not of.cancelled():
                of.exception()  # the caller may have left

        request.add_done_callback(ended)
        return await asyncio.shield(request)

    async def _request(self, sandbox_id: str, record: Record) -> volumes.VolumeStats:
        check_id(sandbox_id)
        device = await workers.run(os.path.realpath, record.device)
        quoted = urllib.parse.quote(urllib.parse.quote(device, safe=""), safe="")  # decoded twice
        async with asyncio.timeout(_SHIM_S):
            body = await _get(
                f"{self._root}/{sandbox_id}/shim-monitor.sock",
                f"/direct-volume/stats?path={quoted}",
            )
        stats = _parsed(body)
        if len(self._known) >= _KNOWN_MAX:
            self._known.pop(next(iter(self._known)))
        self._known[record.digest] = _Known(sandbox_id, stats, time.monotonic())
        return stats


def _aged(known: _Known) -> volumes.VolumeStats:
    age_s = int(time.monotonic() - known.at_s)
    message = f"the numbers are {age_s} s old: no container of the sandbox has the volume now"
    return volumes.VolumeStats(known.stats.usage, volumes.VolumeCondition(False, message))  # noqa: FBT003


def _parsed(body: bytes) -> volumes.VolumeStats:
    """Raises ValueError for what is no answer of the agent."""
    try:
        answer = _Answer.model_validate(json.loads(body))
    except RecursionError as err:
        raise ValueError("an answer that is nested too deep") from err
    usage = tuple(
        volumes.VolumeUsage(_UNITS[each.unit], each.total, each.used, each.available)
        for each in answer.usage
        if each.unit in _UNITS
    )
    if not any(each.unit is volumes.UsageUnit.BYTES for each in usage):
        raise ValueError("an answer without a number of bytes")
    return volumes.VolumeStats(usage)


async def _get(socket: str, path: str) -> bytes:
    """The body of a GET by HTTP on a unix socket. Raises OSError and ValueError."""
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: shim\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read(_ANSWER_BYTES)
        while len(answer) < _ANSWER_BYTES and (more := await reader.read(_ANSWER_BYTES)):
            answer += more
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if status != [b"200"]:
        raise ValueError(body[:300].decode(errors="replace") or "an answer that is not HTTP")
    return body
