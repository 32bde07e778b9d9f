"""A volume's statistics from the guest's kernel, through the connection of the sandbox's runtime to its agent.

A shim that asks the agent gives up after a minute, even if its client has left. So a sandbox has one request in
flight for all callers, and a sandbox that hangs delays no other one. Between two containers the device is not in the
guest, and there are no statistics: then the last ones are returned, and the condition says how old they are. The
numbers come from a guest: this module checks them, and the proxy compares them with the device.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from crust.core import errors, volumes
from crust.core.printable import printable
from crust.handoff import claims
from crust.handoff.record import Record
from crust.handoff.store import Store
from crust.host.filesystems import superblocks
from crust.host.process import workers
from crust.kata.evidence import KataBuilds, Use, VmUnknown
from crust.runtime_handler.service import Handler

_log = logging.getLogger(__name__)

_ANSWER_S = 4.0
"""How long a caller waits; the proxy gives a handler twice that."""
_SAMPLES_MAX = 1024


@dataclass(frozen=True, slots=True)
class _Sample:
    sandbox_id: str
    stats: volumes.VolumeStats
    at_s: float


@dataclass(eq=False)
class Uses:
    """The mounts of containers that run now, by the digest of the volume's target. For several threads."""

    _by_digest: dict[str, Use] = field(default_factory=dict)

    def started(self, digest: str, use: Use) -> None:
        """A container has the volume from now on; of several containers the last one is remembered."""
        self._by_digest[digest] = use

    def ended(self, container_id: str) -> None:
        """The container has no volume any more."""
        for digest, use in list(self._by_digest.items()):
            if use.container_id == container_id:
                self._by_digest.pop(digest, None)

    def keep(self, container_ids: Collection[str]) -> None:
        """Only these containers have volumes: the end of another one was missed."""
        for use in list(self._by_digest.values()):
            if use.container_id not in container_ids:
                self.ended(use.container_id)

    def of(self, digest: str, sandbox_id: str) -> Use:
        """The volume's mount in a sandbox; without a container if no container is known."""
        use = self._by_digest.get(digest)
        return use if use is not None and use.sandbox_id == sandbox_id else Use(sandbox_id)


@dataclass(eq=False)
class KataHandler(Handler):
    """Serves the proxy's calls: statistics, and the problems that `_problems` gives."""

    _store: Store
    _builds: KataBuilds
    _uses: Uses
    _problems: Callable[[], Iterable[errors.CrustError]] = tuple
    _samples: dict[str, _Sample] = field(default_factory=dict)
    _requests: dict[str, asyncio.Task[volumes.VolumeStats]] = field(default_factory=dict)
    """The running request of each sandbox."""

    async def close(self) -> None:
        requests = list(self._requests.values())
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)

    async def problems(self) -> Collection[str]:
        """Of this process, for each of its handlers."""
        found = await workers.run(lambda: list(self._problems()))
        return dict.fromkeys(problem.shown() for problem in found)

    async def stats(self, target: volumes.TargetPath) -> volumes.VolumeStats:
        """The current statistics, or the sandbox's last ones. Raises `NotInSandbox`, `StatisticsUnavailable`."""
        record, sandbox_id = await workers.run(self._holder, target)
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await self._asked(sandbox_id, record)
        except (OSError, ValueError, VmUnknown) as error:  # TimeoutError is an OSError
            reason = printable(str(error)[:300]) or "no answer in time"
            sample = self._samples.get(record.digest)
            if sample is not None and sample.sandbox_id == sandbox_id:
                age_s = int(time.monotonic() - sample.at_s)
                message = f"the numbers are {age_s} s old, there are none now: {reason}"
                condition = volumes.VolumeCondition(abnormal=False, message=message)
                return volumes.VolumeStats(sample.stats.usage, condition)
            is_used = bool(self._uses.of(record.digest, sandbox_id).container_id)
            raise errors.PeerUnavailable.named(
                "StatisticsUnavailable",
                f"the statistics of the volume at {target} are not available",
                why=f"Kata's shim for sandbox {sandbox_id}: {reason}",
                hint="retry; if it stays so, the guest's agent hangs"
                if is_used
                else "retry while a container of the pod runs: none has the volume now",
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
            )
        return entry.require(), entry.claim.sandbox_id

    async def _asked(self, sandbox_id: str, record: Record) -> volumes.VolumeStats:
        while (running := self._requests.get(sandbox_id)) is not None:
            await asyncio.wait([running])
        request = asyncio.create_task(self._request(sandbox_id, record), name="statistics")
        self._requests[sandbox_id] = request

        def ended(task: asyncio.Task[volumes.VolumeStats]) -> None:
            del self._requests[sandbox_id]
            if not task.cancelled():
                task.exception()  # the caller may have left

        request.add_done_callback(ended)
        return await asyncio.shield(request)

    async def _request(self, sandbox_id: str, record: Record) -> volumes.VolumeStats:
        runtime = await workers.run(self._builds.of, sandbox_id)
        told = await runtime.stats(record, self._uses.of(record.digest, sandbox_id))
        stats = volumes.VolumeStats(await workers.run(_usable, record, told), told.condition)
        if len(self._samples) >= _SAMPLES_MAX:
            self._samples.pop(next(iter(self._samples)))
        self._samples[record.digest] = _Sample(sandbox_id, stats, time.monotonic())
        return stats


def _usable(record: Record, told: volumes.VolumeStats) -> tuple[volumes.VolumeUsage, ...]:
    """The numbers with what an ordinary user can still write: Kata's agent tells all free blocks of an ext4.

    Without the superblock they are the agent's.
    """
    if record.mount.fs_type != "ext4" or record.mount.needs_secrets:
        return told.usage
    try:
        superblock = superblocks.read_ext4(record.device)
    except errors.CrustError as error:
        _log.info("the reserved blocks are not known", extra={"error": error})
        return told.usage
    reserved = superblock.reserved_blocks * superblock.block_size_bytes
    return tuple(
        replace(line, available=max(0, line.available - reserved))
        if line.unit is volumes.UsageUnit.BYTES
        else line
        for line in told.usage
    )
