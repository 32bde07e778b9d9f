"""Two parts die, in every order, each at any step of a container: nobody else gets the volume while the machine
lives, nothing of crust ends the machine, and its end frees the volume without a person's hand.

A part that has died is away until the other one dies too, or comes back before, as a daemon that its unit starts
again. After both deaths the questions are asked while everybody is away, and again when all have come back that can:
Kata's shim and the machine cannot. The proxy dies in the middle of an unpublish of the volume.

Of the orders every fourth is run, with each pair of parts among them; `make kills` runs all.
"""

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from crust.core import errors
from crust.handoff import claims
from crust.handoff.record import Record
from crust.handoff.store import Store
from crust.host.block import users
from crust.host.block.holders import DeviceInUse
from crust.host.block.users import Purpose
from crust.kata import gate, nri
from crust.kata.entry import Kind, Placeholders
from crust.kata.keeper_watch import KeeperWatch
from crust.proxy.guard import Targets
from crust.proxy.unpublish import check_given_back
from crust.runtime_handler.blocking import process_of
from tests.integration.kata import conftest as nodes
from tests.integration.kata.conftest import ONE, TWO, KataNode, MakeDevice
from tests.support import processes
from tests.support.kata.sandbox import StandInSandbox
from tests.support.records.records import HANDLER
from tests.support.runtimes.keeper_processes import kill_all_keepers

pytestmark = pytest.mark.root

STEPS = ("publish", "create", "attach", "start")
NEEDED = {"create": {"bridge", "engine"}, "attach": {"engine", "shim", "machine"}}
NEEDED["start"] = NEEDED["create"] | NEEDED["attach"] | {"keepers"}
"""The parts without which a step is not taken: the engine does not ask, or Kata or the bridge refuses."""
REFUSED = (claims.HeldBySandbox, DeviceInUse)


@dataclass
class Life:
    """A container of the first sandbox on its way, and the parts that have died."""

    node: KataNode
    device: str
    one: StandInSandbox
    two: StandInSandbox
    dead: set[str] = field(default_factory=set)
    done: list[str] = field(default_factory=list)
    bridge: gate.KataGate | None = None
    watch: KeeperWatch | None = None
    record: Record = field(init=False)

    def __post_init__(self) -> None:
        self.process = process_of(self.one.pid)

    async def __aenter__(self) -> "Life":
        await self.come_back()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._end_bridge()

    def app(self, of: str = ONE) -> nri.Container:
        """The container, as the engine lists it now; `of` is its sandbox."""
        return nodes.container(
            self.record.target.text,
            id_=f"container-of-{of}",
            pod_id=of,
            is_created="attach" in self.done and "start" not in self.done,
            is_running="start" in self.done,
        )

    # The steps.

    async def take(self, step: str) -> None:
        """A step; what the machine's end refuses is no failure."""
        try:
            await self._take(step)
            self.done.append(step)
        except errors.CrustError:
            if "machine" not in self.dead:
                raise
        if self.watch is not None:
            await self.watch.look_at_keepers()

    async def _take(self, step: str) -> None:
        if step == "publish":
            self.record = self.node.publish("a", self.device)
            return
        if step == "attach" and self.node.kind(self.record) is Kind.REAL:
            self.one.create_container(self.app().id, self.record.device, "/data0")
            return
        assert self.bridge is not None
        if step == "start":
            await self.bridge.start(nodes.pod(), self.app(), nodes.soon())
            assert self.node.kind(self.record) is Kind.PLACEHOLDER
            return
        # for "attach": Kata has refused a placeholder, and the engine creates the container again
        await self.bridge.create(nodes.pod(), self.app(), nodes.soon())
        if step == "attach":
            await self._take(step)

    # The deaths.

    def die(self, part: str) -> None:
        """A part's process ends, and what it has in memory."""
        self.dead.add(part)
        match part:
            case "bridge":
                self._end_bridge()
            case "proxy":
                self._end_proxy()
            case "keeper":
                processes.end(*nodes.keeper_pids(self.node, ONE)[:1])
            case "keepers":
                kill_all_keepers(self.node.grants().socket(ONE))
            case "shim":
                self.one.shim.kill()
                self.one.shim.wait()
            case "machine":
                nodes.end(self.node, self.one)

    def _end_bridge(self) -> None:
        if self.watch is not None:
            self.watch.close()
        self.bridge = self.watch = None

    def _end_proxy(self) -> None:
        """It had taken the lock, if that was free, and put the dead claim aside."""
        paths = self.node.store.layout.entry(self.record.target)
        with contextlib.suppress(claims.HeldBySandbox):
            claims.ClaimLock.acquire(paths, self.record.target).close()

    async def come_back(self) -> None:
        """All come back that can."""
        self.dead &= {"shim", "machine"}
        store, targets = Store(self.node.store.root), Targets([str(self.node.kubelet)])
        store.open()
        store.remove_orphans(targets.unmount_guard)
        watch, bridge = self.watch, self.bridge
        if watch is None or bridge is None:  # as `crust.kata.process` begins
            watch = self.watch = KeeperWatch(self.node.grants(), self.node.builds())
            await watch.look_at_keepers()
            self.node.grants().hide_unclaimed()
            report = self.node.problems.__setitem__
            Placeholders(store, self.node.entries, [HANDLER], report).look_at_volumes()
            bridge = self.bridge = self.node.bridge()
        await watch.look_at_keepers()
        listed = [self.app()] if "attach" in self.done else []
        await bridge.synchronize({ONE: nodes.pod()}, listed)

    # The questions.

    @property
    def is_promised(self) -> bool:
        """Whether the machine has the volume, or Kata may give it to it at any time."""
        return "create" in self.done and "machine" not in self.dead

    async def check(self) -> None:
        """The machine goes on, and nobody else gets its volume."""
        if "machine" not in self.dead:
            assert nodes.lives(self.one.process)
        self._check_entry()
        if not self.is_promised:
            return
        before = self.node.claim(self.record)
        with pytest.raises(REFUSED):
            await self.node.bridge().create(nodes.pod(TWO), self.app(TWO), nodes.soon())
        with pytest.raises(REFUSED):
            self.unpublish()
        if "attach" in self.done or (before is not None and before.live):
            with pytest.raises(DeviceInUse):
                users.check(self.record.block, Purpose.HOST)
        assert self.node.claim(self.record) == before

    def _check_entry(self) -> None:
        """Kata's entry names the device under a live claim alone, once a bridge has looked."""
        claim = self.node.claim(self.record)
        if self.bridge is not None and "keepers" not in self.dead:
            is_real = self.node.kind(self.record) is Kind.REAL
            assert not is_real or (claim is not None and claim.live and claim.sandbox_id == ONE)

    def check_claimed(self) -> None:
        """The parts that came back have the claim again."""
        if self.is_promised:
            claim = self.node.claim(self.record)
            assert claim is not None
            assert (claim.live, claim.sandbox_id, claim.process) == (True, ONE, self.process)

    def unpublish(self) -> None:
        """As the proxy does it, with its questions."""
        targets = Targets([str(self.node.kubelet)])
        with self.node.store.begin_removal(self.record.target) as removal:
            check_given_back(targets, self.record.block, has_ended=removal.has_ended)
            removal.complete(lambda: targets.unmount_guard(self.record.target))

    async def check_freed(self, *, by_another: bool) -> None:
        """The machine ends, and the volume is another sandbox's, or the driver's again."""
        nodes.end(self.node, self.one)
        if by_another:
            await self.come_back()
            assert self.node.kind(self.record) is Kind.PLACEHOLDER
            assert self.bridge is not None
            await self.bridge.create(nodes.pod(TWO), self.app(TWO), nodes.soon())
            claim = self.node.claim(self.record)
            assert claim is not None
            assert (claim.live, claim.sandbox_id) == (True, TWO)
            assert self.node.kind(self.record) is Kind.REAL
            nodes.end(self.node, self.two)
        self.unpublish()
        assert not users.is_held(self.record.block)


PARTS = ("bridge", "engine", "proxy", "keeper", "keepers", "shim", "machine")
_FROM = {"keeper": 1, "keepers": 1}
"""The first step after which there is one."""
_EVERY = 1 if os.environ.get("TESTS_KILLS") == "all" else 4


@dataclass(frozen=True)
class Order:
    """Two deaths, after the steps of these numbers.

    `stays`: the first part is away until the second one dies. `by_another`: everything comes back, and the volume
    goes to another sandbox; else it is unpublished at once.
    """

    first: str
    after_first: int
    second: str
    after_second: int
    stays: bool
    by_another: bool

    @property
    def is_possible(self) -> bool:
        """Whether there are the parts, and the steps between their deaths are taken."""
        if self.after_first < _FROM.get(self.first, 0):
            return False
        if self.after_second < _FROM.get(self.second, 0):
            return False
        if self.first == "machine" and self.second in _FROM:
            return False  # they end with it
        between = STEPS[self.after_first + 1 : self.after_second + 1]
        is_away = self.stays or self.first in ("shim", "machine")
        return not is_away or not any(self.first in NEEDED[step] for step in between)


def orders(first: str) -> Iterator[Order]:
    """All possible ones in which this part dies first."""
    after = itertools.combinations_with_replacement(range(len(STEPS)), 2)
    ways = itertools.product(PARTS, after, (True, False), (True, False))
    for second, (one, two), stays, by_another in ways:
        order = Order(first, one, second, two, stays, by_another)
        if first != second and (stays or one < two) and order.is_possible:
            yield order


@pytest.fixture
def disk(device: MakeDevice) -> str:
    """The device of every life."""
    return device("a").path


@pytest.mark.parametrize("first", PARTS)
async def test_two_deaths_in_any_order_leave_the_volume_one_user(
    disk: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(users, "_PAUSES_S", (0.0,))  # no user here leaves soon
    for order in itertools.islice(orders(first), PARTS.index(first) % _EVERY, None, _EVERY):
        try:
            await _live(order, disk)
        except BaseException as error:
            error.add_note(str(order))
            raise


async def _live(order: Order, disk: str) -> None:
    with (
        nodes.made_node() as node,
        nodes.running(node, ONE) as one,
        nodes.running(node, TWO) as two,
    ):
        async with Life(node, disk, one, two) as life:
            for number, step in enumerate(STEPS[: order.after_second + 1]):
                await life.take(step)
                if number == order.after_first:
                    life.die(order.first)
                if number == order.after_first < order.after_second and not order.stays:
                    await life.come_back()
            life.die(order.second)
            await life.check()
            if order.by_another:
                await life.come_back()
                life.check_claimed()
                await life.check()
                for step in STEPS[order.after_second + 1 :]:
                    if not life.dead & NEEDED[step]:
                        await life.take(step)
                life.check_claimed()
            await life.check_freed(by_another=order.by_another)
