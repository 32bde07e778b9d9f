"""What `crust explain` and `crust policy explain` say of a volume, a target and a decision."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.nodes.commands import crust, invoked
from tests.support.nodes.fake_node import DRIVER, FakeNode
from tests.support.nodes.places import Places


@pytest_asyncio.fixture
async def node(places: Places) -> AsyncIterator[FakeNode]:
    async with FakeNode(places, defer="runtime-class") as running, running.handler():
        yield running


@pytest.fixture
def target(places: Places) -> str:
    return places.target("one")


async def test_volume_and_target_are_explained_by_what_decided(node: FakeNode, target: str) -> None:
    context = {"crust.dev/defer": "always"}
    await node.co.publish("vol-1", target, defer=False, volume_context=context)
    for words in (("--volume", "vol-1"), ("--target", target)):
        result = await crust(node, "explain", *words)
        assert result.exit_code == 0
        assert f"{DRIVER}/vol-1" in result.output
        assert "decided by  the volume context, crust.dev/defer=always" in result.output


async def test_undeferred_target_is_told_how_to_ask(node: FakeNode, target: str) -> None:
    data = {"driverName": "csi.example.com", "specVolID": "pv-1"}
    Path(target).with_name("vol_data.json").write_text(json.dumps(data))
    result = await crust(node, "explain", "--target", target)
    assert result.exit_code == 1
    assert "crust policy explain --driver csi.example.com --context" in result.output
    assert "kubectl get pv pv-1" in result.output


@pytest.mark.parametrize("words", [("--volume", "vol-9"), ("--target", "/nowhere")])
async def test_unreadable_entry_is_not_the_volume(node: FakeNode, words: tuple[str, str]) -> None:
    await node.co.publish(
        "vol-1",
        node.places.target("one"),
        defer=False,
        volume_context={"crust.dev/defer": "always"},
    )
    (entry,) = node.places.entries()
    Path(node.places.volumes, entry, "mountInfo.json").write_text("{")
    result = await crust(node, "explain", *words)
    assert result.exit_code == 1
    assert "1 entries cannot be read" in result.output


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ("explain", 2, ""),
        ("explain MountFailed --volume v", 2, ""),
        ("explain --volume v --target /t", 2, ""),
        ("explain --volume vol-9", 1, "vol-9 is not deferred on this node"),
        (f"policy explain --driver {DRIVER} --context novalue", 2, ""),
        (f"policy explain --driver {DRIVER} --context =x", 2, ""),
        (f"policy explain --driver {DRIVER} --pod web", 2, ""),
        (f"policy explain --driver {DRIVER} --pod a/web/uid-1", 1, "[RuntimeClassNotAsked]"),
        ("policy explain --driver other", 1, DRIVER),
    ],
)
async def test_explain_without_an_answer_exits_with_its_code(
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
    result = await invoked("explain", "--volume", "v", "--run-dir", "/nonexistent")
    assert result.exit_code == 3
    assert "/nonexistent/inspect.sock" in result.output
