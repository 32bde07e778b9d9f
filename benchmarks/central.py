"""CreateVolume through a central controller and a real etcd, at 3 nodes and at 200; its start with 10,000 volumes.

Both clusters run at once, each with an etcd of one member of its own, and are called in turn: the same load of the
machine is on both. The nodes' pools are in memory, each with a connection of its own: what is measured is placement,
routing and the way through etcd, not the making of images.
"""

import contextlib
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import figures
from crust import pool_ids
from crust.cluster.agent import Limits
from crust.cluster.etcd import connect
from examples.cluster import etcd as members
from examples.cluster.etcd import Etcd
from tests.support.cluster.central_cluster import Sidecar, leading
from tests.support.cluster.cluster_contract import eventually
from tests.support.cluster.simulated_pools import SimulatedPool, joined

NAME = "central"
FEW, MANY = 3, 200
ROUNDS = 200
WARM_UP = 20
VOLUMES = 10_000
STARTS = 5
RATIO, START_S = 2.0, 2.0
CREATE, START = "create", "leads until it serves"

Times = figures.Collector[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Result:
    """Samples by what was done and number of nodes, or of volumes."""

    samples: dict[tuple[str, int], figures.Samples]

    def report(self) -> figures.Report:
        """The figures against the goals."""
        few, many = self.samples[CREATE, FEW], self.samples[CREATE, MANY]
        return figures.Report(
            name=NAME,
            title="One controller for many nodes",
            method=(
                f"{ROUNDS} creations with {FEW} nodes and with {MANY}, in turn, each cluster with an etcd of one "
                f"member with TLS; {STARTS} starts of a controller with {VOLUMES:,} volumes recorded."
            ),
            rows=(
                figures.Row(f"CreateVolume, {FEW} nodes", few),
                figures.Row(f"CreateVolume, {MANY} nodes", many, f"CreateVolume, {FEW} nodes"),
                figures.Row(f"start with {VOLUMES:,} volumes", self.samples[START, VOLUMES]),
            ),
            goals=(
                figures.at_most(
                    f"CreateVolume at {MANY} nodes: at most {RATIO:.0f} times that at {FEW} (medians)",
                    many.median / few.median,
                    RATIO,
                    "times",
                ),
                figures.at_most(
                    f"{VOLUMES:,} volumes: a controller that starts serves within {START_S:.0f} s (maximum)",
                    max(self.samples[START, VOLUMES].values),
                    START_S,
                    "s",
                ),
            ),
            meaning=(
                "A creation is two writes of the controller and one of the node, whatever the number of nodes: the "
                "choice of the node is made from announcements in memory. A start reads nothing per volume."
            ),
        )


async def measure() -> Result:
    """Measure with both clusters."""
    times, starts = Times(), Times()
    async with _cluster(FEW) as few, _cluster(MANY) as many:
        both = ((FEW, few.sidecar), (MANY, many.sidecar))
        for number in range(WARM_UP + ROUNDS):
            for count, sidecar in both:
                kept = times if number >= WARM_UP else Times()
                await kept.timed((CREATE, count), sidecar.create(f"volume-{number}"))
    async with _cluster(FEW, VOLUMES) as full:
        await full.leave()
        for number in range(STARTS):
            starts.add((START, VOLUMES), await full.start(f"again-{number}"))
    return Result(times.samples() | starts.samples("s"))


class _Cluster:
    """Nodes, and a controller that can be started again."""

    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd
        self._controller = contextlib.AsyncExitStack()
        self.sidecar: Sidecar

    async def enter(self) -> None:
        """Start the controller."""
        enter = self._controller.enter_async_context
        store = await enter(connect.controller_side(self._etcd.settings("controller")))
        self.sidecar = await enter(leading(store))

    async def leave(self) -> None:
        """End the controller."""
        await self._controller.aclose()

    async def start(self, name: str) -> float:
        """From the start of a controller to its first volume."""
        before_s = time.perf_counter()
        await self.enter()
        await self.sidecar.create(name)
        elapsed_s = time.perf_counter() - before_s
        await self.leave()
        return elapsed_s


@contextlib.asynccontextmanager
async def _cluster(nodes: int, volumes: int = 0) -> AsyncIterator[_Cluster]:
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        etcd = stack.enter_context(members.running(directory))
        pools = [SimulatedPool(f"n{number}", number) for number in range(nodes)]
        for pool in pools:
            given = etcd.settings("controller")
            store = await stack.enter_async_context(connect.node_side(given, pool.node_id))
            await stack.enter_async_context(joined(pool, store, Limits()))
        cluster = _Cluster(etcd)
        await cluster.enter()
        stack.push_async_callback(cluster.leave)
        router = cluster.sidecar.central.router
        await eventually(lambda: len(router.connected()) == nodes)
        marks = {f"/crust/placements/surveyed-{pool.pool_id()}" for pool in pools}
        await eventually(lambda: marks <= set(etcd.keys()))
        await _record(cluster, pools[0].pool_id(), volumes)
        yield cluster


async def _record(cluster: _Cluster, pool_id: str, volumes: int) -> None:
    store = cluster.sidecar.central.router.store
    for number in range(volumes):
        await store.place(pool_ids.name_key("volume", f"recorded-{number}"), pool_id)
