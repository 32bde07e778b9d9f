"""Nodes without a kernel."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from crust.host.process import workers
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.fake_targets import GUARD
from tests.support.nodes.hanging_targets import HangingTargets
from tests.support.nodes.places import Places
from tests.support.nodes.tables import Bench


@pytest.fixture
async def node(places: Places) -> AsyncIterator[FakeNode]:
    async with FakeNode(places) as running:
        yield running


@pytest.fixture
async def kata(node: FakeNode) -> AsyncIterator[FakeNode]:
    """A node with one handler that has all features."""
    async with node.handler():
        yield node


@pytest.fixture
def bench(places: Places) -> Bench:
    return Bench.make(places)


@pytest.fixture
def target(places: Places) -> str:
    return places.target("one")


@pytest.fixture
async def published(kata: FakeNode, target: str) -> str:
    """The target at which "vol-1" is deferred."""
    await kata.co.publish("vol-1", target)
    return target


def lose_a_guard(places: Places) -> None:
    """A guard at the target "lost", whose volume nobody knows: its record went with /run."""
    lost = places.target("lost")
    os.mkdir(lost)
    Path(lost, GUARD).touch()


@pytest.fixture
def targets(places: Places, monkeypatch: pytest.MonkeyPatch) -> HangingTargets:
    """Targets of which none hangs yet. A machine that is busy is no proxy that hangs."""
    monkeypatch.setattr(workers, "FREE_WITHIN_S", 30)
    return HangingTargets(places.kubelet)
