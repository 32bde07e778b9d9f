"""Random lives of a node under a simulated kubelet, by seed: pods come and go while processes die.

SEEDS in the environment is how many lives there are. A life ends with good faults: everything is up, and then every
pod that should run must run, and after the last pod is deleted nothing may be left. What a kubelet forgets by its own
doing (NodeGetCapabilities failed while a volume was uncertain) is found by the reconstruction after its restart, so
such a life ends with one.
"""

import os
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.kubelet.state import Pod, Volume
from tests.support.nodes.places import Places
from tests.support.nodes.simulated_node import SimulatedNode

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
        self._pods = 0
        self._volumes = [
            Volume(f"pv-{number}", f"vol-{number}", CONTEXT, republish=number % 3 == 0)
            for number in range(VOLUMES)
        ]

    async def run(self) -> None:
        """All of it."""
        try:
            for part in PARTS:
                await self._node.start(part)
            await self._node.answers()
            for _ in range(STEPS):
                await self._step()
            await self._end_well()
        finally:
            await self._node.stop_all()

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
        self._kubelet.add(Pod(f"pod-{self._pods}", tuple(chosen)))

    async def _delete_pod(self) -> None:
        desired = [uid for uid in self._kubelet.pods if self._kubelet.is_desired(uid)]
        if desired:
            await self._kubelet.delete(self._random.choice(desired))

    async def _stop_sandbox(self) -> None:
        """Some time after the containers: a kubelet unpublishes while a sandbox still lives."""
        ended = [uid for uid in self._node.sandboxes.live if not self._kubelet.is_desired(uid)]
        if ended:
            self._node.sandboxes.stop(self._random.choice(ended))

    async def _resize(self) -> None:
        volume = self._random.choice(self._volumes)
        size = self._kubelet.wanted_bytes.get(volume.name, 64 * MIB) + 64 * MIB
        self._kubelet.resize(volume.name, size)

    async def _kill(self) -> None:
        part = self._random.choice(PARTS)
        if self._node.is_up(part):
            await self._node.stop(part)

    async def _hang(self) -> None:
        self._node.hang(self._random.choice(("driver", "shim", "handler")))

    async def _revive(self) -> None:
        self._node.unhang()
        for part in PARTS:
            if not self._node.is_up(part):
                await self._node.start(part)
        if self._random.random() < 0.7:  # else the next calls meet a chain that is just coming up
            await self._node.answers()

    async def _faulty_proxy(self) -> None:
        """A proxy that will die, or meet a full disk once, at one of its next changes."""
        fault = self._random.choice(("die_at", "no_space_at"))
        proxy = self._node.proxy(**{fault: self._random.randint(0, 30)})
        await self._node.enter("proxy", proxy)

    async def _lose_an_answer(self) -> None:
        method = self._random.choice(("NodePublishVolume", "NodeUnpublishVolume"))
        self._node.lose_answer(method)

    async def _restart_kubelet(self) -> None:
        await self._kubelet.restart()

    async def _exchange_driver(self) -> None:
        """A driver that does not know deferral takes the socket, or the new one takes it back."""
        self._node.downgrade_driver(to_old=self._node.driver.defers)
        await self._node.start("driver")

    async def _wait_a_minute(self) -> None:
        self._kubelet.clock.advance(60)

    async def _end_well(self) -> None:
        self._node.unhang()
        self._node.downgrade_driver(to_old=False)
        for part in PARTS:
            await self._node.start(part)
        await self._node.answers()
        self._stop_ended_sandboxes()
        self._drop_pods_that_wait_for_each_other()
        await self._help_a_kubelet_that_forgot()
        await self._kubelet.until(lambda: self._kubelet.settled, within_s=SETTLE_S)
        for uid in list(self._kubelet.pods):
            if self._kubelet.is_desired(uid):
                await self._kubelet.delete(uid)
        self._stop_ended_sandboxes()
        await self._kubelet.until(lambda: not self._kubelet.actual.volumes, within_s=SETTLE_S)
        await self._help_a_kubelet_that_forgot()
        await self._kubelet.until(lambda: self._kubelet.empty, within_s=SETTLE_S)
        self._node.check_clean()

    async def _help_a_kubelet_that_forgot(self) -> None:
        if self._kubelet.actual.forgotten:
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
            names = {volume.name for volume in status.pod.volumes}
            if not status.deleted and taken & names:
                status.deleted, status.running = True, False
            elif not status.deleted:
                taken |= names


@pytest.mark.parametrize("seed", range(int(os.environ.get("SEEDS", "10"))))
async def test_simulated_node_leaks_nothing_under_a_final_code(seed: int, short_dir: Path) -> None:
    node = SimulatedNode(Places.make(str(short_dir)))
    await Simulation(seed, node).run()
    assert node.faults == []
    assert node.published > 0, "a run in which nothing ran proves nothing"
