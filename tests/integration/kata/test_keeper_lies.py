"""A keeper that lies to the bridge, at each step of a container: the sandbox keeps its volume, and its machine.

Another peer stands at the socket of a keeper that lives and holds the claim (`standing_in`). The step is refused, or
done; the step without the lie is done.
"""

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from crust.core import errors, volumes
from crust.handoff import claims
from crust.handoff.record import Record
from crust.kata import nri
from crust.kata.entry import Kind
from crust.kata.gate import KataGate
from crust.kata.keeper_watch import KeeperWatch
from crust.runtime_handler.blocking import claim_volume, keepers, kept_vm
from tests.integration.kata.conftest import (
    ONE,
    TWO,
    KataNode,
    MakeDevice,
    container,
    lives,
    pod,
    soon,
)
from tests.support.faults.lying_peers import Way, standing_in
from tests.support.kata.sandbox import StandInSandbox
from tests.support.records.records import HANDLER

pytestmark = pytest.mark.root


@dataclass
class _Life:
    """A container on its way, and another one of its sandbox."""

    bridge: KataGate
    watch: KeeperWatch
    box: StandInSandbox
    record: Record
    is_running: bool = False

    def app(self, id_: str = "container-0001") -> nri.Container:
        """As the engine lists it now."""
        target, is_running = self.record.target.text, self.is_running
        return container(target, id_=id_, is_created=not is_running, is_running=is_running)

    async def create(self) -> None:
        await self.bridge.create(pod(), self.app(), soon())

    async def attach(self) -> None:
        self.box.create_container(self.app().id, self.record.device, "/data0")

    async def start(self) -> None:
        await self.bridge.start(pod(), self.app(), soon())
        self.is_running = True

    async def create_other(self) -> None:
        await self.bridge.create(pod(), self.app("container-0002"), soon())

    async def end(self) -> None:
        await self.bridge.ended(self.app())

    async def synchronize(self) -> None:
        await self.bridge.synchronize({ONE: pod()}, [self.app()])

    async def look(self) -> None:
        await self.watch.look_at_keepers()


Act = Callable[[_Life], Awaitable[None]]
CREATED: tuple[Act, ...] = (_Life.create,)
STARTED: tuple[Act, ...] = (_Life.create, _Life.attach, _Life.start)
STEPS: dict[str, tuple[tuple[Act, ...], Act]] = {
    "create again": (CREATED, _Life.create),
    "start": (STARTED[:2], _Life.start),
    "create another": (STARTED, _Life.create_other),
    "end": (CREATED, _Life.end),
    "synchronize": (CREATED, _Life.synchronize),
    "look": (STARTED, _Life.look),
}
"""What leads to a step, and the step."""


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("name", STEPS)
async def test_lie_of_a_keeper_costs_no_claim_and_no_machine(
    node: KataNode, device: MakeDevice, one: StandInSandbox, name: str, way: Way
) -> None:
    record = node.publish("a", device("a").path)
    watch = KeeperWatch(node.grants(), node.builds())
    life = _Life(node.bridge(), watch, one, record)
    before, step = STEPS[name]
    for act in before:
        await act(life)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(keepers, "_ANSWER_S", 0.05)
        patched.setattr(kept_vm, "_STILL_OURS_S", 0.05)
        with (
            standing_in(str(node.grants().socket(ONE)), way),
            contextlib.suppress(errors.CrustError),
        ):
            await step(life)
    assert lives(one.process)
    claim = node.claim(record)
    assert claim is not None
    assert (claim.live, claim.sandbox_id) == (True, ONE)
    with pytest.raises(claims.HeldBySandbox):
        claim_volume(node.store.root, record.target, volumes.SandboxId(TWO), HANDLER)
    try:
        await step(life)
        await watch.look_at_keepers()
        assert lives(one.process)
        if name != "start":
            await life.end()
        assert node.kind(record) is (Kind.PLACEHOLDER if name != "create another" else Kind.REAL)
    finally:
        watch.close()
