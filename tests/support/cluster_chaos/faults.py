"""Faults: each begins, lasts some seconds, and ends; two may go on at a time.

By a seed they are chosen at random for some minutes, or each one there is happens once, in an order by the seed.
"""

import asyncio
import contextlib
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

from examples.cluster.etcd import Member
from tests.support.cluster_chaos.cluster import CONTROLLERS, Cluster, Driver

_LASTS_S = (1.0, 10.0)
"""Longer than the leases (5 s), and shorter."""
_SHORT_S = (1.0, 7.0)
_PAUSE_S = (0.5, 3.0)
_LOOK_EVERY_S = 1.0
_QUORUM_EVERY = 4
"""Of the faults of etcd every fourth takes two members, and so the quorum."""


class Faults:
    """Does them, and counts."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._cluster = cluster
        self._rng = random.Random(seed)
        self._busy: set[str] = set()

    async def run(self, seconds: float) -> None:
        """Until the time is up; all has healed when it returns."""
        end = asyncio.get_running_loop().time() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(self._one_by_one(end))

    async def run_each(self) -> None:
        """Each fault that there is once; all has healed when it returns."""
        left = [*self._kinds(), ("etcd", self._kill_most_of_etcd)]
        self._rng.shuffle(left)

        async def one_by_one() -> None:
            while left:
                free = next((each for each in left if each[0] not in self._busy), None)
                if free is not None:
                    left.remove(free)
                    async with self._alone(free[0]):
                        await free[1](free[0], self._rng.uniform(*_SHORT_S))
                await asyncio.sleep(_PAUSE_S[0])

        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(one_by_one())

    @contextlib.asynccontextmanager
    async def supervising(self) -> AsyncIterator[None]:
        """While the block runs, start again what has ended by itself, as a kubelet does."""
        task = asyncio.create_task(self._supervise())
        try:
            yield
        finally:
            task.cancel()

    async def _supervise(self) -> None:
        everything = [(node, each) for node, each in self._cluster.nodes.items()]
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            for where, programs in [("", self._cluster.services), *everything]:
                for name in programs.ended():
                    if (where or name) not in self._busy:
                        self.counts[f"{name} ended by itself, and was started again"] += 1
                        await programs.start(name)

    async def _one_by_one(self, end: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < end:
            name, fault = self._rng.choice(self._kinds())
            async with self._alone(name) as is_alone:
                if is_alone:
                    await fault(name, min(self._rng.uniform(*_LASTS_S), max(end - loop.time(), 1)))
            await asyncio.sleep(self._rng.uniform(*_PAUSE_S))

    def _kinds(self) -> list[tuple[str, Callable[[str, float], Awaitable[None]]]]:
        """Every kind of fault with what it befalls."""
        nodes = [each for node in self._cluster.nodes for each in self._of_node(node)]
        controllers = [
            (f"{engine}-{each}", fault)
            for engine in self._cluster.engines
            for each in CONTROLLERS
            for fault in (self._kill_controller, self._pause_controller)
        ]
        stores = [
            ("etcd", self._kill_etcd),
            ("etcd", self._kill_etcd),
            ("etcd", self._pause_etcd),
        ]
        ceph = [
            (name, fault)
            for name in ("osd", "mon.a")
            for fault in (self._kill_ceph, self._pause_ceph)
            if self._cluster.ceph is not None
        ]
        return [*nodes, *controllers, *stores, *ceph]

    def _of_node(self, node: str) -> list[tuple[str, Callable[[str, float], Awaitable[None]]]]:
        return [(node, self._cut), (node, self._kill_node), (node, self._pause_node)]

    @contextlib.asynccontextmanager
    async def _alone(self, name: str) -> AsyncIterator[bool]:
        if name in self._busy:
            yield False
            return
        self._busy.add(name)
        try:
            yield True
        finally:
            self._busy.discard(name)

    async def _cut(self, node: str, lasts_s: float) -> None:
        self.counts["node cut off"] += 1
        host = self._cluster.host(node)
        await self._cluster.hosts.cut(host)
        await asyncio.sleep(lasts_s)
        await self._cluster.hosts.join(host)

    async def _kill_node(self, node: str, lasts_s: float) -> None:
        await self._killed(self._cluster.nodes[node], "driver", lasts_s, "node driver killed")

    async def _pause_node(self, node: str, lasts_s: float) -> None:
        await self._paused(self._cluster.nodes[node], "driver", lasts_s, "node driver stopped")

    async def _kill_controller(self, name: str, lasts_s: float) -> None:
        kind = f"{name.partition('-')[0]} controller killed"
        await self._killed(self._cluster.services, name, lasts_s, kind)

    async def _pause_controller(self, name: str, lasts_s: float) -> None:
        kind = f"{name.partition('-')[0]} controller stopped"
        await self._paused(self._cluster.services, name, lasts_s, kind)

    async def _killed(self, programs: Driver, name: str, lasts_s: float, kind: str) -> None:
        self.counts[kind] += 1
        await programs.kill(name)
        await asyncio.sleep(lasts_s / 2)
        await programs.start(name)

    async def _paused(self, programs: Driver, name: str, lasts_s: float, kind: str) -> None:
        self.counts[kind] += 1
        programs.send(name, signal.SIGSTOP)
        await asyncio.sleep(lasts_s)
        programs.send(name, signal.SIGCONT)

    async def _kill_etcd(self, _: str, lasts_s: float) -> None:
        await self._kill_members(self._some_members("killed"), lasts_s)

    async def _kill_most_of_etcd(self, _: str, lasts_s: float) -> None:
        await self._kill_members(self._some_members("killed", 2), lasts_s)

    async def _kill_members(self, members: list[Member], lasts_s: float) -> None:
        for each in members:
            each.kill()
        await asyncio.sleep(lasts_s)
        for each in members:
            self._cluster.etcd.restart(each)
        for each in members:
            await asyncio.to_thread(each.wait_ready)

    async def _pause_etcd(self, _: str, lasts_s: float) -> None:
        members = self._some_members("stopped")
        for each in members:
            each.pause()
        await asyncio.sleep(lasts_s)
        for each in members:
            each.go_on()

    def _some_members(self, what: str, number: int = 0) -> list[Member]:
        number = number or (2 if self._rng.randrange(_QUORUM_EVERY) == 0 else 1)
        self.counts[f"etcd: {number} of 3 members {what}"] += 1
        return self._rng.sample(self._cluster.etcd.members, number)

    async def _kill_ceph(self, name: str, lasts_s: float) -> None:
        self.counts[f"Ceph {name} killed"] += 1
        assert self._cluster.ceph is not None
        daemon = self._cluster.ceph.daemons[name]
        await asyncio.to_thread(daemon.end, signal.SIGKILL)
        await asyncio.sleep(lasts_s / 2)
        self._cluster.ceph.start(name)

    async def _pause_ceph(self, name: str, lasts_s: float) -> None:
        assert self._cluster.ceph is not None
        self.counts[f"Ceph {name} stopped"] += 1
        with self._cluster.ceph.daemons[name].frozen():
            await asyncio.sleep(lasts_s)
