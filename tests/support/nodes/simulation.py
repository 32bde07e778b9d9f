"""Random life on a simulated node, reproducible by its seed: pods come and go while processes die.

    python -m tests.support.nodes.simulation --seeds 100

runs it and prints the figures. A run ends with good faults: everything is up, and then every pod that should run
must run, and after the last pod is deleted nothing may be left. What a kubelet forgets by its own doing
(NodeGetCapabilities failed while a volume was uncertain) is found by the reconstruction after its restart, so such a
run ends with one. A raw block volume that was lost by a restart is found by nobody, and keeps its device: there an
operator unpublishes it, by hand.
"""

import argparse
import asyncio
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from tests.support.kubelet.state import Pod, Volume
from tests.support.nodes.node import Places
from tests.support.nodes.simulated_node import Figures, SimulatedNode

STEPS = 60
VOLUMES = 6
PARTS = ("proxy", "shim", "driver", "handler")
MIB = 1 << 20
SETTLE_S = 1200.0
CONTEXT = {"crust.dev/defer": "always", "crust.dev/runtime-handler": "kata"}


class Simulation:
    """One run."""

    def __init__(self, seed: int, node: SimulatedNode) -> None:
        self._random = random.Random(seed)
        self._node = node
        self._kubelet = node.kubelet
        self._count = node.figures.counts
        self._pods = 0
        self._volumes = [
            Volume(f"pv-{number}", f"vol-{number}", CONTEXT, republish=number % 3 == 0)
            for number in range(VOLUMES)
        ]
        self._raw = [Volume(f"raw-{n}", f"vol-raw-{n}", CONTEXT, block=True) for n in range(2)]

    async def run(self) -> Figures:
        """All of it; the figures have what was found."""
        try:
            for part in PARTS:
                await self._node.start(part)
            await self._node.answers()
            for _ in range(STEPS):
                await self._step()
            await self._end_well()
        finally:
            await self._node.stop_all()
        return self._node.figures

    async def _step(self) -> None:
        happens: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self._add_pod, 8),
            (self._delete_pod, 6),
            (self._stop_sandbox, 6),
            (self._resize, 2),
            (self._kill, 4),
            (self._revive, 6),
            (self._faulty_proxy, 4),
            (self._lose_an_answer, 3),
            (self._restart_kubelet, 1),
            (self._exchange_driver, 1),
            (self._wait_a_minute, 2),
            (self._hang, 1),
        ]
        acts, weights = zip(*happens, strict=True)
        act = self._random.choices(acts, weights)[0]
        await act()
        # a call to a peer that hangs takes real time
        for _ in range(self._random.randint(1, 2 if act == self._hang else 8)):
            await self._kubelet.turn()
            self._node.check_writers()

    async def _add_pod(self) -> None:
        chosen = self._random.sample(self._volumes, self._random.choice((1, 1, 1, 2)))
        self._pods += 1
        if self._random.random() < 0.2:
            chosen.append(self._random.choice(self._raw))
            self._count["raw block volumes of pods"] += 1
        self._kubelet.add(Pod(f"pod-{self._pods}", tuple(chosen)))
        self._count["pods"] += 1
        self._count["volumes of pods"] += len(chosen)

    async def _delete_pod(self) -> None:
        there = [uid for uid in self._kubelet.pods if self._kubelet.is_desired(uid)]
        if there:
            await self._kubelet.delete(self._random.choice(there))

    async def _stop_sandbox(self) -> None:
        """Some time after the containers: a kubelet unpublishes while a sandbox still lives."""
        ended = [uid for uid in self._node.sandboxes.live if not self._kubelet.is_desired(uid)]
        if ended:
            self._node.sandboxes.stop(self._random.choice(ended))

    async def _resize(self) -> None:
        volume = self._random.choice([*self._volumes, *self._raw])
        size = self._kubelet.wanted_bytes.get(volume.name, 64 * MIB) + 64 * MIB
        self._kubelet.resize(volume.name, size)
        self._count["expansions"] += 1

    async def _kill(self) -> None:
        part = self._random.choice(PARTS)
        if self._node.is_up(part):
            self._count["kills"] += 1
            await self._node.stop(part)

    async def _hang(self) -> None:
        self._node.hang(self._random.choice(("driver", "shim", "handler")))
        self._count["peers that hung"] += 1

    async def _revive(self) -> None:
        self._node.unhang()
        for part in PARTS:
            if not self._node.is_up(part):
                self._note_death(part)
                await self._node.start(part)
        if self._random.random() < 0.7:  # else the next calls meet a chain that is just coming up
            await self._node.answers()

    async def _faulty_proxy(self) -> None:
        """A proxy that will die, or meet a full disk once, at one of its next changes."""
        self._note_death("proxy")
        fault = self._random.choice(("die_at", "no_space_at"))
        await self._node.start("proxy", **{fault: self._random.randint(0, 30)})
        self._count["full disks" if fault == "no_space_at" else "proxies made to die"] += 1

    async def _lose_an_answer(self) -> None:
        method = self._random.choice(("NodePublishVolume", "NodeUnpublishVolume"))
        self._node.lose_answer(method)
        self._count["lost answers of the driver"] += 1

    async def _restart_kubelet(self) -> None:
        self._count["kubelet restarts"] += 1
        await self._kubelet.restart()

    async def _exchange_driver(self) -> None:
        """A driver that does not know deferral takes the socket, or the new one takes it back."""
        self._count["driver exchanged"] += 1
        self._node.downgrade_driver(to_old=self._node.driver.defers)
        await self._node.start("driver")

    async def _wait_a_minute(self) -> None:
        self._kubelet.clock.advance(60)

    def _note_death(self, part: str) -> None:
        if self._node.has_died(part):
            self._count["kills"] += 1

    async def _end_well(self) -> None:
        self._node.unhang()
        self._node.downgrade_driver(to_old=False)
        for part in PARTS:
            self._note_death(part)
            await self._node.start(part)
        await self._node.answers()
        self._stop_ended_sandboxes()
        self._drop_pods_that_wait_for_each_other()
        await self._help_a_kubelet_that_forgot()
        await self._unpublish_lost()  # else the kubelet never gets rid of the device
        await self._kubelet.until(lambda: self._kubelet.settled, within_s=SETTLE_S)
        self._count["pods that ran at the end"] += len(self._kubelet.pods)
        for uid in list(self._kubelet.pods):
            if self._kubelet.is_desired(uid):
                await self._kubelet.delete(uid)
        self._stop_ended_sandboxes()
        await self._kubelet.until(lambda: not self._kubelet.actual.volumes, within_s=SETTLE_S)
        await self._help_a_kubelet_that_forgot()
        await self._kubelet.until(lambda: self._kubelet.empty, within_s=SETTLE_S)
        await self._unpublish_lost()
        self._node.check_clean()

    async def _unpublish_lost(self) -> None:
        self._count["raw block volumes lost by the kubelet"] += await self._node.unpublish_lost()

    async def _help_a_kubelet_that_forgot(self) -> None:
        if self._kubelet.forgotten:
            self._count["forgotten by the kubelet itself"] += len(self._kubelet.forgotten)
            await self._kubelet.restart()

    def _stop_ended_sandboxes(self) -> None:
        for uid in list(self._node.sandboxes.live):
            if not self._kubelet.is_desired(uid):
                self._node.sandboxes.stop(uid)

    def _drop_pods_that_wait_for_each_other(self) -> None:
        """Of the pods that want one volume only the one that has it can run: the others leave the API."""
        taken: set[str] = set()
        statuses = sorted(self._kubelet.pods.values(), key=lambda status: not status.running)
        for status in statuses:
            names = {volume.name for volume in status.pod.volumes if not volume.block}
            if not status.deleted and taken & names:
                status.deleted, status.running = True, False
            elif not status.deleted:
                taken |= names


async def simulate(seed: int) -> Figures:
    """One run with its own node."""
    with tempfile.TemporaryDirectory(prefix="crust-") as root:
        return await Simulation(seed, SimulatedNode(Places.make(root))).run()


def main() -> int:
    """Run the seeds and print the figures; 1 if something was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    total: Counter[str] = Counter()
    faults: list[str] = []
    began_s = time.monotonic()
    for seed in range(options.first, options.first + options.seeds):
        try:
            figures = asyncio.run(simulate(seed))
        except AssertionError as error:
            faults.append(f"seed {seed}: {error}")
            continue
        total.update(figures.counts)
        faults.extend(f"seed {seed}: {fault}" for fault in figures.faults)
    sys.stdout.write(table(options.seeds, total, faults, time.monotonic() - began_s))
    return 1 if faults else 0


def table(seeds: int, total: Counter[str], faults: list[str], elapsed_s: float) -> str:
    calls = {name: number for name, number in total.items() if name.startswith("Node")}
    lines = [f"{seeds} seeds, {elapsed_s:.0f} s"]
    lines += [f"{number:7} {name}" for name, number in sorted(total.items()) if name not in calls]
    lines += [f"{number:7} {name}" for name, number in sorted(calls.items())]
    lines += [f"{len(faults):7} faults", *faults]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
