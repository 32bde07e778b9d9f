"""A volume whose tree takes fsGroup hours: a stop or an unpublish ends its publish early, and it delays no other."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from crust.blockdriver.host import fs_group
from crust.core import errors, operations, volumes
from crust.host.mounts import mountinfo
from crust.host.process import workers
from crust.host.process.workers import LongWork
from tests.support.drivers.block_driver import Bench, mount
from tests.support.raised import raised

pytestmark = pytest.mark.root

GROUPED = mount(group=volumes.GroupChange(4321, volumes.GroupPolicy.ALWAYS))


class Walks:
    """Walks in targets that are `endless` take steps, and reach no name until they are ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.endless: set[str] = set()
        self._begun: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        self._real = fs_group.steps
        monkeypatch.setattr(fs_group, "steps", self._delayed)

    def _delayed(self, root: str, change: volumes.GroupChange) -> Iterator[bool]:
        while root in self.endless:
            self._begun[root].set()
            yield True
        yield from self._real(root, change)

    async def begun(self, root: str) -> None:
        """Wait until the walk in the target `root` has made its first step."""
        await workers.run(self._begun[root].wait)


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> Walks:
    return Walks(monkeypatch)


@asynccontextmanager
async def _walking(bench: Bench, walks: Walks) -> AsyncIterator[tuple[str, str]]:
    """A volume whose publish changes the group of its files until the block ends it: no file has the group yet."""
    volume_id, target = await bench.staged(), bench.target("pod-a")
    walks.endless.add(target)
    publish = asyncio.create_task(bench.publish(volume_id, target, GROUPED))
    await walks.begun(target)
    yield volume_id, target
    with raised("OperationGivenUp", errors.OperationPending):
        await publish
    walks.endless.remove(target)
    assert mountinfo.at(target) is None
    assert not Path(target).exists()


async def test_stop_ends_a_walk_and_the_next_start_walks_again(bench: Bench, walks: Walks) -> None:
    async with _walking(bench, walks) as (volume_id, target):
        await bench.driver.stores.running.drain()
    bench.restart()
    await bench.publish(volume_id, target, GROUPED)
    assert Path(target).stat().st_gid == 4321


async def test_unpublish_ends_a_walk(bench: Bench, walks: Walks) -> None:
    async with _walking(bench, walks) as (volume_id, target):
        with pytest.raises(operations.OperationInProgress):
            await bench.unpublish(volume_id, bench.target("another-pod"))
        with pytest.raises(operations.OperationInProgress):
            await bench.unpublish(volume_id, target)
    await bench.unpublish(volume_id, target)


async def test_walks_in_all_places_delay_no_group_and_no_copy(bench: Bench, walks: Walks) -> None:
    """Here one place of each kind."""
    for kind in LongWork:
        bench.driver.workers.long_work[kind] = asyncio.Semaphore(1)
    async with _walking(bench, walks) as (volume_id, target):
        other_id, other = await bench.staged("pvc-2"), bench.target("pod-b")
        await bench.publish(other_id, other, GROUPED)
        assert Path(other).stat().st_gid == 4321
        await bench.co.snapshot(other_id)
        with pytest.raises(operations.OperationInProgress):
            await bench.unpublish(volume_id, target)
    await bench.unpublish(volume_id, target)
