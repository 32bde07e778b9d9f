"""Each call by which a node's parts ask the kernel fails once, at every step of a volume's life: no answer is no
"no".

A step is one RPC of the CO, on a node whose parts are one process, with a real device. The call that fails is of a
file, a device or a process that the step concerns. The step succeeds or is refused with a code after which the CO
repeats it; the repeat without the failure succeeds. Beside a hidden writer, another process with the device open, a
step that gives the device away never succeeds.

Each call fails with one errno, and the calls take the list in turn; `make lies` gives each call each errno.
"""

import os
from collections.abc import AsyncIterator

import pytest

from crust.host.block import users
from tests.support.co import capability
from tests.support.faults.node_lies import lied
from tests.support.faults.refusals import repeated
from tests.support.nodes.places import Places
from tests.support.nodes.served_node import ONE_PROCESS, BlockNode, started
from tests.support.nodes.volume_life import (
    NOT_FINAL,
    STEPS,
    Life,
    Step,
    is_final,
    refused,
    writer,
    wrong_answers,
)

pytestmark = pytest.mark.root


@pytest.fixture
async def life(places: Places) -> AsyncIterator[Life]:
    async with started(BlockNode(places, parts=ONE_PROCESS)) as node:
        volume_id = (await node.co.create("pvc", capability())).volume_id
        node.created[volume_id] = None
        yield Life(node, volume_id, places.target("one"))


def first(step: Step[Life]) -> int:
    return [*STEPS.values()].index(step)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
async def test_failed_call_at_a_step_is_no_answer(step: Step[Life], life: Life) -> None:
    wrong = await wrong_answers(step, life, lied(life, step, os.getpid(), first=first(step)))
    await life.node.restart("node")  # it removes what a failed removal has left
    assert wrong == []


@pytest.mark.parametrize(
    "step", [pytest.param(step, id=id_) for id_, step in STEPS.items() if step.gives_away]
)
async def test_failed_call_at_a_step_hides_no_writer(
    step: Step[Life], life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(users, "_PAUSES_S", (0.0,))  # this writer does not leave
    for act in step.before:
        await act(life)
    with writer(life.device) as pid:
        wrong = [
            str(failure)
            async for failure, refusal in lied(life, step, pid, first=first(step))
            if refusal is None or (is_final(refusal) and step.left(life))
        ]
        assert await refused(step, life) is not None
    await repeated(lambda: step.act(life), *NOT_FINAL)
    for act in step.after:
        await act(life)
    await life.node.restart("node")
    assert wrong == []
