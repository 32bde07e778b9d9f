"""A node's attach slots: the limit, and who has one, as ControllerGetNodeInfo tells it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from crust.blockdriver.controller.controller_publish import ControllerPublish, PublishRequest
from crust.blockdriver.driver import Driver
from crust.blockdriver.records.attach_slots import AttachSlots
from crust.core import errors, volumes
from tests.support.drivers import driver_state
from tests.support.drivers.block_driver import mount
from tests.support.drivers.driver_state import NODE
from tests.support.raised import raised


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


@pytest.mark.spec("N-6", "N-7")
async def test_slots_name_each_volume_once_however_it_got_its_slot(
    state: Driver, publisher: ControllerPublish
) -> None:
    published, attached, both = await volumes_of(state, "abc")
    for each in (published, both):
        await publisher.publish(to_node(each))
    for each in (attached, both):
        state.stores.access.attach(each)
    slots = publisher.slots(NODE)
    assert slots.limit == 3
    assert slots.taken == tuple(sorted((published, attached, both)))
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
    slots = AttachSlots(NODE, between, between.attached, 3)  # type: ignore[arg-type]
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
    known, unannounced = await volumes_of(state, "ab")
    await publisher.publish(to_node(known))
    state.stores.access.attach(unannounced)
    assert publisher.slots(NODE).limit == 3
    assert publisher.slots(NODE, [known]).limit == 2
    assert publisher.slots(NODE, [known, "unattached-yet"]).limit == 2
    assert publisher.slots(NODE, [known, unannounced]).limit == 3
    assert publisher.slots(NODE, [known]).taken == tuple(sorted((known, unannounced)))


@pytest.mark.spec("N-9")
async def test_refused_publish_leaves_no_free_slot_in_the_next_answer(
    state: Driver, publisher: ControllerPublish
) -> None:
    ids = await volumes_of(state, "abcd")
    state.stores.access.attach(ids[0])  # nobody published it: the CO does not know it
    co = set(ids[1:3])
    for each in co:
        await publisher.publish(to_node(each))
    with raised("AttachLimitReached"):
        await publisher.publish(to_node(ids[3]))
    found = publisher.slots(NODE)
    assert found.limit - len(set(found.taken) - co) == len(co)
    assert publisher.slots(NODE, tuple(co)).limit == len(co)
    state.stores.access.detach(ids[0])
    await publisher.publish(to_node(ids[3]))
