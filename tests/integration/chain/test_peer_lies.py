"""Each question that a part asks another over a socket gets no true answer once, at every step of a volume's life.

The peer is away, does not accept, speaks no protocol, never answers, answers nonsense, or its answer is lost. The
step succeeds, or is refused with a code after which the CO repeats it unless nothing is left; the repeat succeeds.
Beside a hidden writer, another process with the device open, a step that gives the device away never succeeds. Every
question has a deadline; here the CO of a question that hangs gives up, and its peer ends.

Each question meets one lie, and the questions take the list in turn; `make lies` has each question meet each lie.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio
import pytest

from crust.core import errors, volumes
from crust.csi_shim.wrap.node_shim import Wrapping
from crust.host.block import users
from crust.rpc import channel
from crust.rpc.status import PeerStatus
from tests.integration.wrap.conftest import DEFERRED, Volume, Wrapped
from tests.support.co import MIB, NAMED, Co, capability
from tests.support.drivers import vendor_driver
from tests.support.faults import lies
from tests.support.faults.lying_peers import Lie, Relay, Way
from tests.support.nodes import snapshot_life
from tests.support.nodes.node import PARTS
from tests.support.nodes.places import Places
from tests.support.nodes.relayed_node import Relayed, RelayedBlockNode
from tests.support.nodes.served_node import started
from tests.support.nodes.snapshot_life import SnapshotLife
from tests.support.nodes.volume_life import (
    NOT_FINAL,
    STEPS,
    Act,
    LifeT,
    Refused,
    Scene,
    Step,
    is_final,
    take,
    text_of,
    writer,
    wrong_answers,
)
from tests.support.runtimes.fake_handler import USAGE

pytestmark = pytest.mark.root

Code = grpc.StatusCode


@dataclass
class GuestLife(SnapshotLife):
    """A volume of our driver that a guest may have, and what the CO asks about it."""

    answer: object = None

    @property
    def size(self) -> int:
        return (64 + self.others) * MIB

    async def stats(self) -> None:
        answer = await self.node.co.stats(self.volume_id, self.target)
        self.answer = [usage.total for usage in answer.usage]

    def is_told(self) -> bool:
        return self.answer == [usage.total for usage in USAGE]

    async def enlarge(self) -> None:
        """At the controller."""
        await self.next()
        await self.node.co.grow(self.volume_id, self.size)

    async def expand(self) -> None:
        answer = await self.node.co.expand(self.volume_id, self.target, self.size)
        self.answer = answer.capacity_bytes

    def is_expanded(self) -> bool:
        known = self.node.record(self.target).mount.capacity_bytes
        grown = self.guest.expansions[-1][1].required_bytes
        return self.answer == known == grown == self.size

    async def limit(self) -> None:
        await self.node.co.modify(self.volume_id, readIOPS=str(100 + self.others))

    def is_limited(self) -> bool:
        wanted = volumes.IoLimits(read_iops=100 + self.others)
        known = self.node.record(self.target).mount.io_limits
        return self.guest.limits[self.target] == known == wanted

    async def ask_secrets(self) -> None:
        """The handler asks the proxy."""
        target = volumes.TargetPath(self.target)
        try:
            self.answer = await self.node.value("handler").secrets_of(target)
        except errors.CrustError as error:
            raise PeerStatus.of(error) from error

    def has_secrets(self) -> bool:
        return self.answer == {}

    async def next(self) -> None:
        self.answer = None
        await super().next()


IN_GUEST: tuple[Act[GuestLife], ...] = (GuestLife.stage, GuestLife.defer, GuestLife.claim)
OF_GUESTS: dict[str, Step[GuestLife]] = {
    "stats": Step(GuestLife.stats, IN_GUEST, (GuestLife.next,), is_done=GuestLife.is_told),
    "expand": Step(
        GuestLife.expand,
        (*IN_GUEST, GuestLife.enlarge),
        (GuestLife.enlarge,),
        is_done=GuestLife.is_expanded,
    ),
    "limit": Step(GuestLife.limit, IN_GUEST, (GuestLife.next,), is_done=GuestLife.is_limited),
    "secrets": Step(
        GuestLife.ask_secrets, IN_GUEST, (GuestLife.next,), is_done=GuestLife.has_secrets
    ),
    **{
        name: Step(
            GuestLife.snapshot,
            before,
            (GuestLife.delete_snapshot, GuestLife.next),
            is_done=GuestLife.is_copied,
            left=GuestLife.left,
        )
        for name, before in (("snapshot-deferred", IN_GUEST[:2]), ("snapshot-in-guest", IN_GUEST))
    },
}
OWN: dict[str, Step[GuestLife]] = {
    name: step for name, step in STEPS.items() if name != "claim"
} | OF_GUESTS
"""With our driver. A claim asks no peer."""


@dataclass
class RelayedWrapped(Relayed, Wrapped):
    """With a driver that knows nothing of deferral."""


@dataclass
class WrappedLife(Scene[RelayedWrapped]):
    """A volume of another driver."""

    volume: Volume = field(kw_only=True)
    answer: object = None

    def records(self) -> list[str]:
        """The shim's record of a stage as block, and of its change."""
        paths = self.node.paths(self.volume)
        return [path for path in (paths.staging, paths.change) if os.path.lexists(path)]

    @property
    def leaves(self) -> list[str]:
        published = self.node.paths(self.volume).published
        return os.listdir(published) if os.path.lexists(published) else []

    def is_staged(self) -> bool:
        return len(self.records()) == 1

    def left(self) -> list[str]:
        return [*self.published, *self.leaves]

    def is_deferred(self) -> bool:
        return (len(self.entries), self.mounts, len(self.leaves)) == (1, ["guard"], 1)

    def is_mounted(self) -> bool:
        return (self.left(), self.records()) == (["ext4"], [])

    def is_unpublished(self) -> bool:
        return self.left() == []

    async def stage(self) -> None:
        await self.node.stage(self.volume)

    async def unstage(self) -> None:
        await self.node.unstage(self.volume)

    async def defer(self) -> None:
        await self.node.publish(self.volume, self.target, flag=True)

    async def mount(self) -> None:
        await self.node.publish(self.volume, self.target)

    async def unpublish(self) -> None:
        await self.node.unpublish(self.volume, self.target)

    async def give_back(self) -> None:
        """The shim's part of an unpublish, as where the proxy has lost the entry: the shim alone asks for writers."""
        async with channel.connect(self.node.places.shim) as connected:
            await Co(connected).unpublish(self.volume_id, self.target, flag=True)

    def is_given_back(self) -> bool:
        return self.leaves == []

    async def stats(self) -> None:
        answer = await self.node.co.stats(self.volume_id, self.target)
        self.answer = [usage.total for usage in answer.usage]

    def is_told(self) -> bool:
        return self.answer == [usage.total for usage in USAGE]

    async def expand(self) -> None:
        size = (64 + self.others) * MIB
        self.answer = await self.node.expand(self.volume, self.target, size)

    def is_expanded(self) -> bool:
        return self.answer == (64 + self.others) * MIB

    async def next(self) -> None:
        self.answer = None
        await super().next()


W = WrappedLife
DEFERRED_STEPS = {
    "stage": Step(W.stage, (), (W.unstage,), is_done=W.is_staged, left=W.records),
    "unstage": Step(W.unstage, (W.stage,), (W.stage,), is_done=lambda life: life.records() == []),
    "publish": Step(W.defer, (W.stage,), (W.unpublish,), is_done=W.is_deferred, left=W.left, gives_away=True),
    "publish-again": Step(W.defer, (W.stage, W.defer), (), is_done=W.is_deferred, left=W.left),
    "unpublish": Step(W.unpublish, (W.stage, W.defer), (W.defer,), is_done=W.is_unpublished, gives_away=True),
    "give-back": Step(W.give_back, (W.stage, W.defer), (W.defer,), is_done=W.is_given_back, gives_away=True),
    "stats": Step(W.stats, (W.stage, W.defer, W.claim), (W.next,), is_done=W.is_told),
    "expand": Step(W.expand, (W.stage, W.defer, W.claim, W.next), (W.next,), is_done=W.is_expanded),
}  # fmt: skip
"""Of a volume that is always deferred."""
SWITCHED_STEPS = {
    "to-guest": Step(
        W.defer, (W.stage,), (W.unpublish, W.mount, W.unpublish),
        is_done=W.is_deferred, left=W.left, gives_away=True,
    ),
    "to-host": Step(
        W.mount, (W.stage, W.defer, W.unpublish), (W.unpublish, W.defer, W.unpublish),
        is_done=W.is_mounted, left=W.left,
    ),
    "unpublish-host": Step(W.unpublish, (W.stage, W.mount), (W.mount,), is_done=W.is_unpublished),
}  # fmt: skip
"""Of a volume for which each publish decides: the driver unstages it, and stages it in the other way."""
WRAPPED = {
    **{name: (DEFERRED, step) for name, step in DEFERRED_STEPS.items()},
    **{name: (NAMED, step) for name, step in SWITCHED_STEPS.items()},
}


@pytest.fixture
async def life(places: Places, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GuestLife]:
    async with started(RelayedBlockNode(places)) as node:
        volume_id = (await node.co.create("pvc", capability())).volume_id
        node.created[volume_id] = None
        made = GuestLife(node, volume_id, places.target("one"))
        await node.enter("handler", node.handler(made.guest))
        snapshot_life.watch(made, monkeypatch)
        yield made
        await made.release()


@asynccontextmanager
async def wrapped_life(places: Places, context: dict[str, str]) -> AsyncIterator[WrappedLife]:
    """With a driver that attaches and stages."""
    kind = "cloud"
    with vendor_driver.running(kind, places.root) as driver:
        node = RelayedWrapped(
            places,
            driver=driver,
            driver_name=vendor_driver.NAMES[kind],
            wrapping=Wrapping(places.kubelet),
            parts=PARTS[1:],
        )
        async with started(node):
            volume = await node.volume(context=context)
            made = WrappedLife(node, volume.volume_id, node.target("one"), volume=volume)
            yield made
            await made.release()


Truth = Callable[[Refused | None], bool]
"""Whether a refusal, or none, is the answer of a node without lies."""


async def _answer(step: Step[LifeT], life: LifeT, name: str) -> Refused | None:
    """The refusal of the step. Where a question hangs at the relay, the CO gives up."""
    relay: Relay = life.node.relays[name]
    call = asyncio.ensure_future(step.act(life))
    hangs = asyncio.ensure_future(relay.hangs.wait())
    await asyncio.wait({call, hangs}, return_when=asyncio.FIRST_COMPLETED)
    if hangs.done():
        call.cancel()
    hangs.cancel()
    try:
        await call
    except (grpc.aio.AioRpcError, errors.CrustError) as refusal:
        return refusal
    except asyncio.CancelledError:
        return errors.PeerUnavailable("the CO gave up")
    return None


async def _truth(
    step: Step[LifeT], life: LifeT, name: str, is_true: Truth
) -> tuple[list[str], Refused | None]:
    """The questions that pass a relay during the step, over new connections, and the true answer of the step."""
    while True:
        await life.node.restore(name)
        refusal = await _answer(step, life, name)
        if is_true(refusal):
            return [*life.node.relays[name].asked], refusal
        assert refusal is not None
        assert not is_final(refusal), text_of(refusal)
        await asyncio.sleep(0.01)


def _ways(number: int) -> tuple[Way, ...]:
    ways = tuple(Way)
    return ways if lies.ALL else (ways[number % len(ways)],)


async def _lied(
    step: Step[LifeT], life: LifeT, *, first: int, is_true: Truth = lambda refusal: refusal is None
) -> AsyncIterator[tuple[str, Refused | None]]:
    """Take the step with no lie at each relay, and then with each; after each the caller has it repeated."""
    relays: dict[str, Relay] = life.node.relays
    for name, relay in relays.items():
        asked, refusal = await _truth(step, life, name, is_true)
        yield f"{name}: {asked}", refusal
        for number, question in enumerate(asked):
            for way in _ways(first + number):
                await relay.restore(Lie(number, way))
                refusal = await _answer(step, life, name)
                await life.node.restore(name)
                yield f"{name}, {question}: {way.value}", refusal
        assert relay.without_deadline == set()


async def _wrong(step: Step[LifeT], life: LifeT, *, first: int) -> list[str]:
    return await wrong_answers(step, life, _lied(step, life, first=first), *NOT_FINAL)


@pytest.mark.parametrize("name", OWN)
async def test_peers_lie_at_a_step_is_no_answer(name: str, life: GuestLife) -> None:
    assert await _wrong(OWN[name], life, first=[*OWN].index(name)) == []


@pytest.mark.parametrize("name", WRAPPED)
async def test_peers_lie_at_a_wrapped_step_is_no_answer(name: str, places: Places) -> None:
    context, step = WRAPPED[name]
    async with wrapped_life(places, context) as life:
        assert await _wrong(step, life, first=[*WRAPPED].index(name)) == []


async def _given_away(step: Step[LifeT], life: LifeT, *, first: int) -> list[str]:
    """The lies by which a device is given away, or forgotten, beside a writer, who leaves then."""

    def is_refused(refusal: Refused | None) -> bool:
        return refusal is not None and "DeviceInUse" in text_of(refusal)

    await take(step.before, life, *NOT_FINAL)
    with writer(life.device):
        given_away = [
            lie
            async for lie, refusal in _lied(step, life, first=first, is_true=is_refused)
            if refusal is None or (is_final(refusal) and step.left(life))
        ]
    await take((step.act, *step.after), life, *NOT_FINAL)
    return given_away


@pytest.fixture
def staying(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer does not leave soon."""
    monkeypatch.setattr(users, "_PAUSES_S", (0.0,))


@pytest.mark.usefixtures("staying")
@pytest.mark.parametrize("name", [name for name, step in OWN.items() if step.gives_away])
async def test_peers_lie_at_a_step_hides_no_writer(name: str, life: GuestLife) -> None:
    assert await _given_away(OWN[name], life, first=[*OWN].index(name)) == []


@pytest.mark.usefixtures("staying")
@pytest.mark.parametrize("name", [name for name, (_, step) in WRAPPED.items() if step.gives_away])
async def test_peers_lie_at_a_wrapped_step_hides_no_writer(name: str, places: Places) -> None:
    context, step = WRAPPED[name]
    async with wrapped_life(places, context) as life:
        assert await _given_away(step, life, first=[*WRAPPED].index(name)) == []
