"""Sessions that write one image, on one node after the other: ended, killed, or cut off while they write.

A session that does not end by itself is fenced before one on another node begins, as an operator or the CO does it.
Beside some a second one is started on another node, for which nobody was cut off: it must be refused.
"""

import asyncio
import contextlib
import dataclasses
import json
import random
import signal
from pathlib import Path

from examples.cluster.services import NAMESPACE
from tests.support.cluster_chaos.cluster import WRITER, Cluster, run_in, signalled
from tests.support.cluster_chaos.image_writer import WriterCommand
from tests.support.cluster_chaos.journal import Journal

_PROGRAM = "tests.support.cluster_chaos.image_writer"
_BEGINS_S = 30.0
_ENDS_S = 60.0
_WRITES_S = (1.0, 5.0)
_RIVALS = 0.25


class Sessions:
    """Of one image."""

    def __init__(
        self, cluster: Cluster, image: str, seed: str, *, with_claims: bool = True
    ) -> None:
        self._cluster = cluster
        self._image = image
        self._with_claims = with_claims
        self._rng = random.Random(seed)
        self._rivals = random.Random(f"{seed}-rivals")
        self._path: Path = cluster.base / "sessions" / f"{image}.jsonl"
        self._journal = Journal(self._path)
        self._number = 0
        self._held_by = ""
        """The node whose session was not given back."""
        self.fenced = 0
        self.written_on = 0
        """Sessions that were stopped, fenced, and let go on while a successor wrote."""

    async def run(self, until: float) -> None:
        """One after the other, until that time of the loop; all have ended when it returns."""
        while asyncio.get_running_loop().time() < until:
            node = self._rng.choice(sorted(self._cluster.nodes))
            if await self._free(node):
                await self._session(node)
        self._journal.close()

    async def _free(self, node: str) -> bool:
        """Whether a session on that node may begin: another node's was given back or is fenced."""
        if self._held_by in ("", node):
            return True
        if not await self._fence(self._held_by):
            await asyncio.sleep(1)
            return False
        self._held_by = ""
        return True

    async def _session(self, node: str) -> None:
        process = await self._start(node)
        if process is None:
            return
        await asyncio.sleep(self._rng.uniform(*_WRITES_S))
        if self._rivals.random() < _RIVALS:
            await self._intrude(node)
        match self._rng.choice(("stop", "kill", "succeed", "succeed")):
            case "stop":
                await self._stop(process)
            case "kill":
                await _kill(process)
            case _:
                await self._succeed(process, node)

    async def _start(self, node: str) -> asyncio.subprocess.Process | None:
        """A session that writes, or None if it could not begin."""
        self._number += 1
        process = await self._process(node, WRITER, self._cluster.writer_key, fence=False)
        assert process.stdout is not None
        self._held_by = node
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_BEGINS_S):
                if await process.stdout.readline():
                    return process
        await _kill(process)
        return None

    async def _intrude(self, node: str) -> None:
        """A session on another node while this one has the image."""
        self._number += 1
        other = self._rivals.choice(sorted(set(self._cluster.nodes) - {node}))
        process = await self._process(other, WRITER, self._cluster.writer_key, fence=False)
        assert process.stdout is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_BEGINS_S):
                is_admitted = bool(await process.stdout.readline())
                event = "admitted" if is_admitted else "refused"
                self._journal.write(event, session=self._number, node=other, beside=node)
                if is_admitted:
                    await asyncio.sleep(_WRITES_S[0])
        await _kill(process)

    async def _stop(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ENDS_S):
                if await process.wait() == 0:
                    self._held_by = ""
        await _kill(process)

    async def _succeed(self, process: asyncio.subprocess.Process, node: str) -> None:
        """Stopped or only unreachable, it is fenced; a successor writes elsewhere, and the first goes on."""
        if pauses := self._rng.random() < 0.5:
            signalled(process, signal.SIGSTOP)
        if await self._fence(node):
            self._held_by = ""
            other = self._rng.choice(sorted(set(self._cluster.nodes) - {node}))
            successor = await self._start(other)
            if pauses:
                signalled(process, signal.SIGCONT)
            if successor is not None:
                self.written_on += 1
                await asyncio.sleep(self._rng.uniform(*_WRITES_S))
                await self._stop(successor)
        await _kill(process)

    async def _fence(self, node: str) -> bool:
        process = await self._process("", "controller", self._cluster.controller_key, fence=node)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ENDS_S):
                if await process.wait() == 0:
                    self.fenced += 1
                    return True
        await _kill(process)
        return False

    async def _process(
        self, node: str, user: str, key: str, *, fence: str | bool
    ) -> asyncio.subprocess.Process:
        assert self._cluster.ceph is not None
        order = WriterCommand(
            monitors=self._cluster.ceph.monitors,
            user=user,
            key=key,
            namespace=NAMESPACE,
            image=self._image,
            node=node or str(fence),
            session=self._number,
            journal=str(self._path),
            fence=bool(fence),
            with_claims=self._with_claims,
        )
        host = self._cluster.host(node) if node else self._cluster.hosts.services
        return await run_in(host, _PROGRAM, line=json.dumps(dataclasses.asdict(order)))


async def _kill(process: asyncio.subprocess.Process) -> None:
    signalled(process, signal.SIGKILL)
    await process.wait()
