"""Create, attach, start and end of two sandboxes in any order, with everything that can die in between.

Whatever the order: a container with a mount of the volume starts only if its own sandbox has the claim and its
virtual machine has the device, and Kata's entry names the device only under a claim.
"""

import asyncio
import contextlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crust.core import errors
from crust.handoff.record import Record
from crust.host.block import loop, openers
from crust.kata import entry, gate
from crust.kata.entry import Kind
from crust.kata.keeper_watch import KeeperWatch
from tests.integration.kata import conftest as nodes
from tests.integration.kata.conftest import ONE, TWO, KataNode
from tests.support.kata.sandbox import StandInSandbox
from tests.support.runtimes.keeper_processes import kill_all_keepers

pytestmark = pytest.mark.root

SOURCES = ("{0}", "{0}/", "{0}/sub", "{0}/../mount", "{1}/a/mount", "{1}/a/mount/deep/er")
"""By which a mount may reach the volume: {0} its target, {1} a link to the kubelet's root."""

Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "create",
                "attach",
                "start",
                "end",
                "detach",
                "keepers",
                "machine",
                "bridge",
                "look",
                "runc",
            ]
        ),
        st.integers(0, 1),
        st.integers(0, len(SOURCES) - 1),
    ),
    min_size=4,
    max_size=14,
)


class _Run:
    """One order of steps on one node."""

    def __init__(self, node: KataNode, record: Record, stack: ExitStack) -> None:
        self.node, self.record = node, record
        self.boxes = [stack.enter_context(nodes.running(node, id_)) for id_ in (ONE, TWO)]
        self.bridge: gate.KataGate = node.bridge()
        self.watch = KeeperWatch(node.grants(), node.builds())
        self.attached: set[int] = set()
        (node.directory / "link").symlink_to(node.kubelet)

    async def run(self, steps: list[Step]) -> None:
        for action, at, source in steps:
            with contextlib.suppress(errors.CrustError):
                await self._step(action, at, source)
            self._check()
        self.watch.close()

    async def _step(self, action: str, at: int, source: int) -> None:
        box = self.boxes[at]
        path = SOURCES[source].format(self.record.target.text, f"{self.node.directory}/link")
        app = nodes.container(path, id_=f"container-{at}-{source}", pod_id=box.id)
        match action:
            case "create":
                await self.bridge.create(nodes.pod(box.id), app, nodes.soon())
            case "runc":
                await self.bridge.create(nodes.pod(box.id, handler="runc"), app, nodes.soon())
                raise AssertionError("another runtime's pod was created")
            case "attach" if self._kata_finds_the_device(path) and nodes.lives(box.process):
                self._attach(box, at, app.id)
            case "start":
                await self.bridge.start(nodes.pod(box.id), app, nodes.soon())
                self._check_started(box)
            case "end":
                await self.bridge.ended(app)
            case "detach" if at in self.attached and nodes.lives(box.process):
                box.detach(self.record.device)
                self.attached.discard(at)
            case "machine":
                nodes.end(self.node, box)
                self.attached.discard(at)
            case _:
                await self._fault(action, box)

    async def _fault(self, action: str, box: StandInSandbox) -> None:
        if action == "keepers":
            await self.watch.look_at_keepers()
            kill_all_keepers(self.node.grants().socket(box.id))
            await self.watch.look_at_keepers()
        elif action == "bridge":
            self.bridge = self.node.bridge()
            self.node.grants().hide_unclaimed()

    def _attach(self, box: StandInSandbox, at: int, container_id: str) -> None:
        """Kata attaches what its entry names when it creates the container, and asks nobody."""
        if at in self.attached:
            box.write_container(container_id, self.record.device, "/data0")
        else:
            box.create_container(container_id, self.record.device, "/data0")
            self.attached.add(at)

    def _kata_finds_the_device(self, path: str) -> bool:
        return any(
            name == entry.name_of(path) and self.node.entries.kind(name, self.record) is Kind.REAL
            for name in self.node.entries.names()
        )

    def _check_started(self, box: StandInSandbox) -> None:
        claim = self.node.claim(self.record)
        assert claim is not None
        assert (claim.live, claim.sandbox_id) == (True, box.id)
        assert openers.opened_by(box.pid, (self.record.identity,))

    def _check(self) -> None:
        claim = self.node.claim(self.record)
        names = self.node.entries.names()
        if any(self.node.entries.kind(name, self.record) is Kind.REAL for name in names):
            assert claim is not None
            assert claim.live
        assert sorted(os.listdir(f"{self.node.entries.root}/{names[0]}")) == ["mountInfo.json"]


@contextmanager
def _run(device: str) -> Iterator[_Run]:
    with nodes.made_node() as node, ExitStack() as stack:
        record = node.publish("a", device)
        yield _Run(node, record, stack)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[str]:
    with open(tmp_path / "disk", "wb") as file:
        file.truncate(64 << 20)
    attached = loop.attach(f"{tmp_path}/disk")
    yield attached.path
    loop.detach(attached)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_no_order_starts_a_container_without_its_volume(disk: str, steps: list[Step]) -> None:
    with _run(disk) as run:
        asyncio.run(run.run(steps))
