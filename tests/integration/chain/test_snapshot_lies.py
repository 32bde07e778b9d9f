"""Each call by which a copy is made, or a snapshot removed, fails once: an answered copy is of one moment, and no
filesystem stays frozen.

As `test_lies`, at the RPCs of snapshots, with the calls that change files, and FIFREEZE and FITHAW, among those that
fail. A copy is of one moment if nothing could write while it was made: the filesystem was frozen, on this host or in
the guest, or the device was held.
"""

import os
from collections.abc import AsyncIterator

import pytest

from tests.support.co import capability
from tests.support.faults import lies
from tests.support.faults.node_lies import lied
from tests.support.nodes import snapshot_life
from tests.support.nodes.places import Places
from tests.support.nodes.served_node import BlockNode, started
from tests.support.nodes.snapshot_life import SnapshotLife
from tests.support.nodes.volume_life import Act, Step, wrong_answers

pytestmark = pytest.mark.root

Way = tuple[Act[SnapshotLife], ...]


def _copied(by: Act[SnapshotLife], before: Way, *, undo: Act[SnapshotLife]) -> Step[SnapshotLife]:
    """A step that makes a copy."""
    after = (undo, SnapshotLife.next)
    return Step(by, before, after, is_done=SnapshotLife.is_copied, left=SnapshotLife.left)


def _removed(by: Act[SnapshotLife], made: Act[SnapshotLife], before: Way) -> Step[SnapshotLife]:
    """A step that removes what `made` makes."""
    return Step(by, (*before, made), (SnapshotLife.next, made), is_done=SnapshotLife.is_gone)


ON_HOST: Way = (SnapshotLife.stage, SnapshotLife.mount)
WAITING: Way = (SnapshotLife.stage, SnapshotLife.defer)
IN_GUEST: Way = (*WAITING, SnapshotLife.claim)
BOTH: Way = (SnapshotLife.second, *IN_GUEST)
TAKE, DROP = SnapshotLife.snapshot, SnapshotLife.delete_snapshot
GROUP, DROP_GROUP = SnapshotLife.take_group, SnapshotLife.delete_group
CLONE, DELETE = SnapshotLife.copy, SnapshotLife.delete
STEPS = {
    "snapshot-idle": _copied(TAKE, (), undo=DROP),
    "snapshot-on-host": _copied(TAKE, ON_HOST, undo=DROP),
    "snapshot-deferred": _copied(TAKE, WAITING, undo=DROP),
    "snapshot-in-guest": _copied(TAKE, IN_GUEST, undo=DROP),
    "snapshot-delete": _removed(DROP, TAKE, ()),
    "group": _copied(GROUP, BOTH, undo=DROP_GROUP),
    "group-delete": _removed(DROP_GROUP, GROUP, BOTH),
    "clone-on-host": _copied(CLONE, ON_HOST, undo=DELETE),
    "clone-in-guest": _copied(CLONE, IN_GUEST, undo=DELETE),
    "restore": _copied(SnapshotLife.restore, (TAKE, SnapshotLife.keep), undo=DELETE),
}


ASK_AS_OTHERS = ("group", "clone-in-guest")
"""These steps ask what other steps ask, so only what they change fails, unless all does."""


@pytest.fixture
async def life(places: Places, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SnapshotLife]:
    async with started(BlockNode(places, parts=("node", "calls"))) as node:
        volume_id = (await node.co.create("pvc", capability())).volume_id
        node.created[volume_id] = None
        made = SnapshotLife(node, volume_id, places.target("one"))
        await node.enter("handler", node.handler(made.guest))
        snapshot_life.watch(made, monkeypatch)
        yield made
        await made.release()
        await node.restart("node")  # it removes what a failed removal has left


@pytest.mark.parametrize("name", STEPS)
async def test_failed_call_at_a_copy_is_no_wrong_copy(name: str, life: SnapshotLife) -> None:
    step, first = STEPS[name], [*STEPS].index(name)
    asks = ("fcntl.ioctl",) if name in ASK_AS_OTHERS and not lies.ALL else lies.CALLS
    calls = (*asks, *lies.CHANGES)
    lied_to = lied(life, step, os.getpid(), first=first, calls=calls)
    assert await wrong_answers(step, life, lied_to) == []
