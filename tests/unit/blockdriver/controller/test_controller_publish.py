"""Publishing to nodes: idempotent, exclusive, limited, durable, and visible to the node part."""

from pathlib import Path

import pytest

from crust.blockdriver.controller import controller_publish
from crust.blockdriver.driver import Driver
from crust.blockdriver.engines.protocol import StillAttached
from crust.blockdriver.records import capability_check
from crust.blockdriver.records.models import Attached, Usage
from crust.blockdriver.records.node_state import AttachSlots, Staged
from crust.core import errors, volumes
from tests.support.drivers import driver_state
from tests.support.drivers.block_driver import MIB, Mode, mount
from tests.support.drivers.driver_state import NODE
from tests.support.drivers.memory_backend import MemoryBackend
from tests.support.raised import raised


@pytest.fixture
def state(tmp_path: Path) -> Driver:
    return driver_state.opened(tmp_path, attach_slots=AttachSlots(NODE, 3))


async def made(state: Driver, names: str = "a") -> list[volumes.VolumeId]:
    """A volume for each letter."""
    create = state.controller.provisioner.create
    return [(await create(driver_state.create(name))).volume_id for name in names]


def publish(
    state: Driver,
    volume_id: str,
    capability: volumes.VolumeCapability | None = None,
    *,
    node: str = NODE,
    readonly: bool = False,
) -> None:
    controller_publish.publish_to_node(
        state.stores, volumes.VolumeId(volume_id), node, capability or mount(), readonly=readonly
    )


def unpublish(state: Driver, volume_id: volumes.VolumeId, node: str) -> None:
    controller_publish.unpublish_from_node(state.stores, volume_id, node)


async def test_controller_publish_with_another_mode_is_a_conflict(state: Driver) -> None:
    (volume_id,) = await made(state)
    publish(state, volume_id)
    with raised("PublishedToNodeDifferently"):
        publish(state, volume_id, mount(mode=Mode.SINGLE_NODE_WRITER))


async def test_controller_publish_without_fs_type_matches_before_and_after_formatting(
    state: Driver,
) -> None:
    create = driver_state.create("pvc-1", capability=mount("xfs"), required=320 * MIB)
    volume_id = (await state.controller.provisioner.create(create)).volume_id
    publish(state, volume_id, mount(""))
    known = state.stores.content_records.load(volume_id)
    state.stores.content_records.save(known.replaced(state="formatted", fs_type="xfs"))
    publish(state, volume_id, mount(""))
    publish(state, volume_id, mount("xfs"))
    unpublish(state, volume_id, NODE)
    publish(state, volume_id, mount("xfs"))
    publish(state, volume_id, mount(""))
    with raised("PublishedToNodeDifferently"):
        publish(state, volume_id, mount("ext4"))


async def test_controller_publish_to_second_node_names_the_first_until_unpublished(
    state: Driver,
) -> None:
    (volume_id,) = await made(state)
    usage = Usage(kind="mount", fs_type="ext4", mode=7)
    old = Attached(node_id="renamed-since", usage=usage, readonly=False)
    state.stores.volume_records.save(
        state.stores.volume_records.load(volume_id).replaced(nodes=(old,))
    )
    with pytest.raises(capability_check.PublishedToOtherNode, match="renamed-since"):
        publish(state, volume_id)
    unpublish(state, volume_id, NODE)
    assert state.controller.lister.get(volume_id).nodes == ("renamed-since",)
    unpublish(state, volume_id, "")
    publish(state, volume_id)


async def test_controller_publish_survives_a_restart_and_blocks_delete(
    state: Driver, tmp_path: Path
) -> None:
    (volume_id,) = await made(state)
    publish(state, volume_id, readonly=True)
    backend = state.stores.provisioning
    assert isinstance(backend, MemoryBackend)
    again = driver_state.opened(tmp_path, backend=backend)
    (node,) = again.stores.volume_records.load(volume_id).nodes
    assert node.readonly
    assert again.stores.volume_records.index.on_node(NODE) == {volume_id}
    with pytest.raises(capability_check.PublishedToOtherNode):
        again.controller.provisioner.delete(volume_id)
    unpublish(again, volume_id, NODE)
    unpublish(again, volume_id, NODE)
    again.controller.provisioner.delete(volume_id)
    unpublish(again, volume_id, "")


async def test_controller_unpublish_of_a_staged_volume_is_refused(state: Driver) -> None:
    (volume_id,) = await made(state)
    publish(state, volume_id)
    state.stores.access.attach(volume_id)
    state.stores.node_state.note_staged(
        Staged(volume_id=volume_id, kind="mount", fs_type="ext4", paths=("/s",))
    )
    with pytest.raises(StillAttached):
        unpublish(state, volume_id, "")
    state.stores.volume_records.save(state.stores.volume_records.load(volume_id).replaced(nodes=()))
    assert state.controller.lister.get(volume_id).nodes == (NODE,)
    state.stores.access.detach(volume_id)
    state.stores.node_state.forget_staged(volume_id)
    assert state.controller.lister.get(volume_id).nodes == ()


async def test_attach_slots_when_full_refuse_an_unannounced_volume(state: Driver) -> None:
    attached, published, third = await made(state, "abc")
    slots, access = state.stores.attach_slots, state.stores.access
    slots.limit = 2
    with slots.taking(attached):
        access.attach(attached)
    publish(state, published)
    with raised("AttachLimitReached"), slots.taking(third):
        pytest.fail("it was given a slot")
    with slots.taking(published):
        access.attach(published)
    with slots.taking(attached):  # it has its own
        access.detach(attached)
    with slots.taking(third):
        access.attach(third)


@pytest.mark.spec("N-6", "N-7")
async def test_slots_name_each_volume_once_however_it_got_its_slot(state: Driver) -> None:
    slots = state.stores.attach_slots
    published, attached, both = await made(state, "abc")
    for volume_id in (published, both):
        publish(state, volume_id)
    for volume_id in (attached, both):
        state.stores.access.attach(volume_id)
    assert slots.in_use(NODE) == (3, tuple(sorted((published, attached, both))))
    with pytest.raises(errors.NotFound):
        slots.in_use("other")


@pytest.mark.spec("N-8")
async def test_limit_for_co_that_names_volumes_excludes_the_others(state: Driver) -> None:
    slots = state.stores.attach_slots
    known, unannounced = await made(state, "ab")
    publish(state, known)
    state.stores.access.attach(unannounced)
    assert slots.in_use(NODE)[0] == 3
    assert slots.in_use(NODE, [known])[0] == 2
    assert slots.in_use(NODE, [known, "unattached-yet"])[0] == 2
    assert slots.in_use(NODE, [known, unannounced])[0] == 3
    assert slots.in_use(NODE, [known])[1] == tuple(sorted((known, unannounced)))


@pytest.mark.spec("N-9")
async def test_refused_publish_leaves_no_free_slot_in_the_next_answer(state: Driver) -> None:
    slots = state.stores.attach_slots
    unannounced, *known, refused = await made(state, "abcd")
    state.stores.access.attach(unannounced)  # nobody published it: the CO does not know it
    for volume_id in known:
        publish(state, volume_id)
    with raised("AttachLimitReached"):
        publish(state, refused)
    limit, taken = slots.in_use(NODE)
    assert limit - len(set(taken) - set(known)) == len(known)
    assert slots.in_use(NODE, known)[0] == len(known)
    state.stores.access.detach(unannounced)
    publish(state, refused)
