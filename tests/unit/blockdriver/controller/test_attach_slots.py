"""A node's attach slots: the limit, and who has one, as ControllerGetNodeInfo tells it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from crust import errors, volumes
from crust.blockdriver.controller.controller_publish import ControllerPublish, PublishRequest
from crust.blockdriver.driver import Driver
from crust.blockdriver.records import published_nodes
from crust.blockdriver.records.attach_slots import AttachSlots
from crust.host.mounts import mount_capacity
from tests.support.drivers import driver_state
from tests.support.drivers.block_driver import mount
from tests.support.drivers.driver_state import NODE
from tests.support.drivers.memory_backend import MemoryBackend


@pytest.fixture
def state(tmp_path: Path) -> Driver:
    return driver_state.opened(tmp_path, max_volumes=3)


@pytest.fixture
def publisher(state: Driver) -> ControllerPublish:
    return state.controller_rules.publisher


async def volumes_of(state: Driver, names: str) -> list[volumes.VolumeId]:
    create = state.controller_rules.provisioner.create
    return [(await create(driver_state.create(each))).volume_id for each in names]


def to_node(volume_id: volumes.VolumeId) -> PublishRequest:
    return PublishRequest(volume_id, NODE, mount(), readonly=False)


@pytest.mark.spec("N-6")
async def test_attach_limit_falls_and_rises_with_what_others_attach(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mount_capacity, "max_volumes", lambda: 10)
    backend = MemoryBackend()
    unlimited = driver_state.opened(tmp_path, backend=backend)
    slots, limit = (
        unlimited.controller_rules.publisher.slots,
        unlimited.node_rules.live.attach_limit,
    )
    assert slots(NODE).limit == limit() == 10
    backend.foreign = 4
    assert slots(NODE).limit == limit() == 6
    backend.foreign = 30  # 0 would mean that there is no limit
    assert slots(NODE).limit == limit() == 1
    backend.foreign = 0
    assert slots(NODE).limit == limit() == 10


@pytest.mark.spec("N-7")
async def test_slots_name_each_volume_once_however_it_got_its_slot(
    state: Driver, publisher: ControllerPublish
) -> None:
    published, attached, both = await volumes_of(state, "abc")
    for each in (published, both):
        await publisher.publish(to_node(each))
    for each in (attached, both):
        state.stores.access.attach(each)
    assert publisher.slots(NODE).taken == tuple(sorted((published, attached, both)))
    with pytest.raises(errors.NotFound):
        publisher.slots("other")


class _Between:
    """An index or engine in which something happens between two questions."""

    def __init__(self) -> None:
        self.on: set[volumes.VolumeId] = set()
        self.here: set[volumes.VolumeId] = set()
        self.then: Callable[[], object] = lambda: None

    def on_node(self, _: str) -> frozenset[volumes.VolumeId]:
        answer = frozenset(self.on)
        self.then()
        return answer

    def attached(self) -> tuple[volumes.VolumeId, ...]:
        return tuple(self.here)


@pytest.mark.spec("N-7")
def test_slots_hold_a_publish_that_ends_between_the_questions() -> None:
    """The record is saved after the index was read, and the publish ends before anybody asks what is on its way."""
    between, volume_id = _Between(), volumes.VolumeId("v")
    slots = AttachSlots(NODE, between, between.attached, lambda: 3)  # type: ignore[arg-type]
    publish = slots.taking(volume_id)
    publish.__enter__()
    between.then = lambda: between.on.add(volume_id)
    assert slots.now().taken == (volume_id,)
    between.then = lambda: None
    publish.__exit__(None, None, None)
    assert slots.now().taken == (volume_id,)


@pytest.mark.spec("N-8")
async def test_limit_for_a_co_that_names_its_volumes_is_less_by_the_others(
    state: Driver, publisher: ControllerPublish
) -> None:
    known, ephemeral = await volumes_of(state, "ab")
    await publisher.publish(to_node(known))
    state.stores.access.attach(ephemeral)
    assert publisher.slots(NODE).limit == 3
    assert publisher.slots(NODE, [known]).limit == 2
    assert publisher.slots(NODE, [known, "unattached-yet"]).limit == 2
    assert publisher.slots(NODE, [known, ephemeral]).limit == 3
    assert publisher.slots(NODE, [known]).taken == tuple(sorted((known, ephemeral)))


@pytest.mark.spec("N-9")
async def test_refused_publish_leaves_no_free_slot_in_the_next_answer(
    state: Driver, publisher: ControllerPublish
) -> None:
    ids = await volumes_of(state, "abcd")
    state.stores.access.attach(ids[0])  # nobody published it: the CO does not know it
    co = set(ids[1:3])
    for each in co:
        await publisher.publish(to_node(each))
    with pytest.raises(published_nodes.AttachLimitReached):
        await publisher.publish(to_node(ids[3]))
    found = publisher.slots(NODE)
    assert found.limit - len(set(found.taken) - co) == len(co)
    assert publisher.slots(NODE, tuple(co)).limit == len(co)
    state.stores.access.detach(ids[0])
    await publisher.publish(to_node(ids[3]))


class _Asked:
    """A limit, and a lower bound of it, that count who asks."""

    def __init__(self, limit: int, at_least: int) -> None:
        self._limit, self._at_least = limit, at_least
        self.exactly = self.roughly = 0

    def limit(self) -> int:
        self.exactly += 1
        return self._limit

    def at_least(self) -> int:
        self.roughly += 1
        return self._at_least


def test_attach_asks_for_the_exact_limit_once_and_only_from_its_lower_bound_on() -> None:
    between, asked = _Between(), _Asked(limit=3, at_least=1)
    slots = AttachSlots(NODE, between, between.attached, asked.limit, asked.at_least)  # type: ignore[arg-type]
    first, second, third, fourth = [volumes.VolumeId(each) for each in "abcd"]
    with slots.taking(first):
        between.here.add(first)
    assert (asked.roughly, asked.exactly) == (1, 0)
    for number, each in enumerate((second, third), start=1):
        with slots.taking(each):
            between.here.add(each)
        assert (asked.roughly, asked.exactly) == (1 + number, number)
    with slots.taking(first):  # it has its slot, whatever the limit is
        pass
    assert (asked.roughly, asked.exactly) == (4, 2)
    with pytest.raises(published_nodes.AttachLimitReached), slots.taking(fourth):
        pytest.fail("it was given a slot")
    assert (asked.roughly, asked.exactly) == (5, 3)
    assert fourth not in slots.now().taken


async def test_attach_limit_counts_the_attachments_of_others_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice would be at two moments."""
    backend, counts = MemoryBackend(), [4, 5]
    live = driver_state.opened(tmp_path, backend=backend).node_rules.live
    monkeypatch.setattr(mount_capacity, "max_volumes", lambda: 10)
    monkeypatch.setattr(backend, "foreign_attachments", lambda: counts.pop(0))
    monkeypatch.setattr(backend, "attach_limit", lambda foreign: 10 - foreign)
    assert live.attach_limit() == 6
    assert counts == [5]
