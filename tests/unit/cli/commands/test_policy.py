"""What `crust policy explain` says of a decision."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.nodes.commands import crust, invoked
from tests.support.nodes.fake_node import DRIVER, FakeNode
from tests.support.nodes.places import Places


@pytest_asyncio.fixture
async def node(places: Places) -> AsyncIterator[FakeNode]:
    async with FakeNode(places, defer="runtime-class") as running, running.handler():
        yield running


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (f"policy explain --driver {DRIVER} --context novalue", 2, ""),
        (f"policy explain --driver {DRIVER} --context =x", 2, ""),
        (f"policy explain --driver {DRIVER} --pod web", 2, ""),
        (f"policy explain --driver {DRIVER} --pod a/web/uid-1", 1, "[RuntimeClassNotAsked]"),
        ("policy explain --driver other", 1, DRIVER),
    ],
)
async def test_policy_without_a_decision_exits_with_its_code(
    node: FakeNode, words: str, code: int, text: str
) -> None:
    result = await crust(node, *words.split())
    assert (result.exit_code, text in result.output) == (code, True), result.output


@pytest.mark.parametrize(
    ("words", "decision", "decider"),
    [
        (("--flag",), "deferred", "the CO's flag defer_fs_ops"),
        (("--block", "--context", "pool=a"), "ordinary mount on the host", "the driver's default"),
    ],
)
async def test_policy_names_the_rule_that_decides(
    node: FakeNode, words: tuple[str, ...], decision: str, decider: str
) -> None:
    result = await crust(node, "policy", "explain", "--driver", DRIVER, *words)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0] == f"decision    {decision}"
    assert decider in lines[-1]


async def test_proxy_that_is_not_there_exits_3() -> None:
    result = await invoked("policy", "explain", "--driver", DRIVER, "--run-dir", "/nonexistent")
    assert result.exit_code == 3
    assert "/nonexistent/inspect.sock" in result.output
