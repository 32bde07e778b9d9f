"""Targets that hang, and a node with few threads upon them."""

import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from crust.core import volumes
from crust.host.process.workers import Workers
from crust.proxy.target import TargetState
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.fake_targets import FakeTargets
from tests.support.nodes.places import Places

THREADS = 3


class HangingTargets(FakeTargets):
    """The guards of targets in `hung`, and looks at the target `unseen`, do not answer until `released`."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.hung: set[str] = set()
        self.unseen = ""
        self.calls: Counter[str] = Counter()
        self.released = threading.Event()
        self._more = threading.Condition()

    def look(self, target: volumes.TargetPath) -> TargetState:
        self._hang(target, {self.unseen})
        return super().look(target)

    def mount_guard(self, target: volumes.TargetPath, *, names: bool) -> None:
        self._hang(target, self.hung)
        with self._more:
            super().mount_guard(target, names=names)
            self._more.notify_all()

    def unmount_guard(self, target: volumes.TargetPath) -> None:
        self._hang(target, self.hung)
        super().unmount_guard(target)

    def wait_for(self, target: str) -> None:
        """Until a call hangs there. Blocks."""
        with self._more:
            self._more.wait_for(lambda: self.calls[target])

    def wait_for_guard(self, target: str) -> None:
        """Until the guard is mounted there. Blocks."""
        with self._more:
            self._more.wait_for(lambda: self.has_guard(volumes.TargetPath(target)), timeout=50)

    def _hang(self, target: volumes.TargetPath, hung: set[str]) -> None:
        if target.text not in hung:
            return
        with self._more:
            self.calls[target.text] += 1
            self._more.notify_all()
        self.released.wait()


@asynccontextmanager
async def running(places: Places, targets: HangingTargets) -> AsyncIterator[FakeNode]:
    """A node with few threads, and a handler. A stop waits for what hangs, so that is released first."""
    threads = Workers("the proxy", limit=THREADS)
    async with FakeNode(places, targets=targets, threads=threads) as node, node.handler():
        try:
            yield node
        finally:
            targets.released.set()
