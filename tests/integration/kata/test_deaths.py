"""Each part that can die, at each step of a container: the claim stays with its sandbox, or ends with the machine."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from crust.handoff import claims
from crust.handoff.record import Record
from crust.handoff.store import Store
from crust.kata import nri
from crust.kata.entry import Kind
from crust.kata.keeper_watch import KeeperWatch
from tests.integration.kata.conftest import (
    ONE,
    KataNode,
    MakeDevice,
    container,
    end,
    keeper_pids,
    lives,
    pod,
    soon,
)
from tests.support.kata.sandbox import StandInSandbox
from tests.support.runtimes.keeper_processes import kill_all_keepers

pytestmark = pytest.mark.root


@dataclass
class _Life:
    """A container on its way; `done` are the steps behind it."""

    node: KataNode
    box: StandInSandbox
    record: Record
    watch: KeeperWatch
    done: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bridge = self.node.bridge()

    def app(self) -> nri.Container:
        """As the engine lists it now."""
        is_running = "start" in self.done
        target = self.record.target.text
        return container(target, is_created=not is_running, is_running=is_running)

    async def step(self, name: str) -> None:
        """Create, attach or start."""
        if name == "create":
            await self.bridge.create(pod(), self.app(), soon())
        elif name == "attach":
            self.box.create_container(self.app().id, self.record.device, "/data0")
        else:
            await self.bridge.start(pod(), self.app(), soon())
        self.done.append(name)

    async def again(self) -> None:
        """The bridge, or the engine, has come back: the plugin synchronizes."""
        await self.bridge.synchronize({ONE: pod()}, [self.app()])


async def _bridge(life: _Life) -> None:
    life.node.grants().hide_unclaimed()
    life.bridge = life.node.bridge()
    await life.again()


async def _engine(life: _Life) -> None:
    await life.again()


async def _proxy(life: _Life) -> None:
    """Another one opens the directory, and removes nothing of what it finds."""
    Store(life.node.store.root).open()


async def _keeper(life: _Life) -> None:
    os.kill(keeper_pids(life.node, ONE)[0], signal.SIGKILL)


async def _both_keepers(life: _Life) -> None:
    kill_all_keepers(life.node.grants().socket(ONE))
    await life.watch.look_at_keepers()


async def _shim(life: _Life) -> None:
    life.box.shim.kill()
    life.box.shim.wait()
    await life.watch.look_at_keepers()


STEPS = ("create", "attach", "start")


@pytest.mark.parametrize("after", STEPS)
@pytest.mark.parametrize("dies", [_bridge, _engine, _proxy, _keeper, _both_keepers, _shim])
async def test_what_dies_beside_the_machine_leaves_the_sandbox_its_volume(
    node: KataNode,
    device: MakeDevice,
    one: StandInSandbox,
    after: str,
    dies: Callable[[_Life], object],
) -> None:
    record = node.publish("a", device("a").path)
    life = _Life(node, one, record, KeeperWatch(node.grants(), node.runtimes()))
    try:
        for name in STEPS:
            await life.step(name)
            if name == "create":
                await life.watch.look_at_keepers()  # the watch knows the keeper
            if name == after:
                await dies(life)  # type: ignore[misc]
    finally:
        life.watch.close()
    claim = node.claim(record)
    assert claim is not None
    assert (claim.live, claim.sandbox_id) == (True, ONE)
    assert node.kind(record) is Kind.PLACEHOLDER
    assert lives(one.process)


@pytest.mark.parametrize("after", STEPS)
async def test_the_machine_s_death_frees_the_volume_whatever_was_done(
    node: KataNode, device: MakeDevice, one: StandInSandbox, after: str
) -> None:
    record = node.publish("a", device("a").path)
    life = _Life(node, one, record, KeeperWatch(node.grants(), node.runtimes()))
    for name in STEPS[: STEPS.index(after) + 1]:
        await life.step(name)
    end(node, one)
    life.watch.close()
    assert not claims.is_held(node.store.layout.entry(record.target))
    assert node.kind(record) is Kind.PLACEHOLDER
    with node.store.begin_removal(record.target) as begun:
        begun.complete()
