"""An upgrade under a live sandbox: the node's files are those that the programs of an earlier commit have left.

The kernel's part (device, guard mount, the lock of the claim) is made by the present programs, which end before the
frozen files take the place of theirs.
"""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from crust.blockdriver.engines.files import pool
from crust.host.process import syscalls
from tests.support import capabilities
from tests.support.faults.refusals import refused
from tests.support.nodes.served_node import ONE_PROCESS, BlockNode, started
from tests.support.records import freeze_node, frozen_nodes
from tests.support.records.frozen_nodes import NO_REQUEST, NO_SCHEMA, PRESENT, FrozenNode

FAILED_PRECONDITION, UNAVAILABLE = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAVAILABLE,
)
pytestmark = pytest.mark.root


@pytest.fixture(autouse=True)
def root(tmp_path: Path) -> Iterator[None]:
    capabilities.need("mount", "loop")
    with frozen_nodes.root_at(str(tmp_path)):
        yield


@asynccontextmanager
async def upgraded(frozen: FrozenNode) -> AsyncIterator[tuple[BlockNode, str]]:
    """A node of which a sandbox has the volume, started on the frozen files; with the volume's target."""
    places = frozen_nodes.places_of("own")
    target = frozen_nodes.target(places)
    identity = {"schema": pool.SCHEMA, "pool_id": frozen.pool_id, "created": "2026-01-01"}
    Path(places.root, "state").mkdir(mode=0o700)
    Path(places.root, "state/pool.json").write_text(json.dumps(identity))
    async with started(BlockNode(places, parts=ONE_PROCESS)) as node:
        assert await node.volume() == frozen.volume_id
        await node.publish(frozen.volume_id, target)
        with node.sandbox(target):
            block = node.record(target).block
            await node.stop()
            frozen_nodes.put(frozen, f"{places.root}/driver-run", places.volumes, block)
            await node.start()
            yield node, target


def state_of(node: BlockNode, volume_id: str) -> Path:
    return Path(node.places.root, "driver-run", syscalls.boot_id(), f"{volume_id}.json")


@pytest.mark.parametrize(
    ("commit", "of_stage", "of_publish"),
    [
        (PRESENT, "", ""),
        (NO_REQUEST, "", "EntryDiffers"),
        (NO_SCHEMA, "UnreadableEntry", "EntryDiffers"),
    ],
)
async def test_volume_of_an_earlier_node_goes_on_and_ends(
    commit: str, of_stage: str, of_publish: str
) -> None:
    """A repeated call is answered OK, or refused by name with nothing changed, and in no final code."""
    frozen = frozen_nodes.load(commit)
    volume_id = frozen.volume_id
    async with upgraded(frozen) as (node, target):
        entry = node.entry(target)
        assert entry is not None
        assert entry.claim is not None
        assert (entry.claim.live, entry.claim.sandbox_id) == (True, "box-1")
        assert (await node.co.stats(volume_id, target)).usage
        record, state = node.record(target), state_of(node, volume_id)
        before = state.read_text()
        for call, named in (
            (node.stage(volume_id), of_stage),
            (node.publish(volume_id, target), of_publish),
        ):
            if named:
                await refused(call, UNAVAILABLE, named)
            else:
                await call
        assert node.record(target) == record
        after = state.read_text()
        assert after == before or (not of_stage and is_in(json.loads(before), json.loads(after)))
        await refused(node.unpublish(volume_id, target), FAILED_PRECONDITION, "HeldBySandbox")
    # the node's end has unpublished and unstaged the volume, and found nothing of it
    assert not state.exists()


def is_in(frozen: Any, made: Any) -> bool:
    """Whether each key of the frozen value is in the one that was made, with a value of its kind."""
    if isinstance(frozen, dict):
        has = isinstance(made, dict) and made.keys() >= frozen.keys()
        return has and all(is_in(value, made[key]) for key, value in frozen.items())
    if isinstance(frozen, list):
        return isinstance(made, list) and all(map(is_in, frozen, made))
    return type(made) is type(frozen)


async def test_present_programs_write_every_field_of_an_earlier_node() -> None:
    """A field that goes, or another name of a file, needs a new schema number, and data of that commit."""
    frozen = frozen_nodes.load(PRESENT)
    made = await freeze_node.own(Path(__file__).parents[3])
    records = {path for path, of in frozen.parts["own"].items() if of.text}
    assert len(records) == 3
    now = {
        path.replace(frozen_nodes.volume_of(made), frozen.volume_id): of
        for path, of in made.items()
    }
    assert now.keys() == frozen.parts["own"].keys()
    for path in records:
        assert is_in(json.loads(frozen.parts["own"][path].text), json.loads(now[path].text)), path
