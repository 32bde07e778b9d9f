"""`crust explain --volume | --target` and `crust policy explain`, against a running proxy."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from click.testing import CliRunner, Result

from crust.cli import main
from tests.support.nodes import node as nodes
from tests.support.nodes.node import DRIVER, Node, Places


@pytest_asyncio.fixture
async def node(places: Places) -> AsyncIterator[Node]:
    async with nodes.running(places, defer="runtime-class") as running, running.handler():
        yield running


async def crust(node: Node, *words: str) -> Result:
    """Run the command in a thread: it has an event loop of its own."""
    arguments: Sequence[Any] = [*words, "--run-dir", node.places.run]
    return await asyncio.to_thread(CliRunner().invoke, main.main, arguments)


async def test_volume_and_target_are_explained_by_what_decided(node: Node) -> None:
    target = node.places.target("one")
    context = {"crust.dev/defer": "always"}
    await node.co.publish("vol-1", target, defer=False, volume_context=context)
    for words in (("--volume", "vol-1"), ("--target", target)):
        result = await crust(node, "explain", *words)
        assert result.exit_code == 0
        assert f"{DRIVER}/vol-1" in result.output
        assert "decided by  the volume context, crust.dev/defer=always" in result.output


async def test_volume_that_is_not_deferred_exits_1(node: Node) -> None:
    result = await crust(node, "explain", "--volume", "vol-9")
    assert result.exit_code == 1
    assert "vol-9 is not deferred on this node" in result.output


async def test_target_that_is_not_deferred_is_told_how_to_ask_what_decides(node: Node) -> None:
    target = node.places.target("one")
    said = {"driverName": "csi.example.com", "specVolID": "pv-1"}
    Path(target).with_name("vol_data.json").write_text(json.dumps(said))
    result = await crust(node, "explain", "--target", target)
    assert result.exit_code == 1
    assert "crust policy explain --driver csi.example.com --context" in result.output
    assert "kubectl get pv pv-1" in result.output


@pytest.mark.parametrize("words", [("--volume", "vol-9"), ("--target", "/nowhere")])
async def test_explain_unreadable_entry_is_not_treated_as_the_volume(
    node: Node, words: tuple[str, str]
) -> None:
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
    "words", [(), ("MountFailed", "--volume", "v"), ("--volume", "v", "--target", "/t")]
)
async def test_explain_needs_exactly_one_subject(node: Node, words: tuple[str, ...]) -> None:
    assert (await crust(node, "explain", *words)).exit_code == 2


@pytest.mark.parametrize(
    ("words", "decision", "decider"),
    [
        (("--flag",), "deferred", "the CO's flag defer_fs_ops"),
        (("--context", "crust.dev/defer=always"), "deferred", "crust.dev/defer=always"),
        (
            ("--context", "crust.dev/defer=never"),
            "ordinary mount on the host",
            "crust.dev/defer=never",
        ),
        (("--block",), "ordinary mount on the host", "the driver's default"),
    ],
)
async def test_policy_names_the_rule_that_decides(
    node: Node, words: tuple[str, ...], decision: str, decider: str
) -> None:
    result = await crust(node, "policy", "explain", "--driver", DRIVER, *words)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0] == f"decision    {decision}"
    assert decider in lines[-1]


async def test_policy_that_cannot_decide_says_why_and_exits_1(node: Node) -> None:
    pod = ("--pod", "default/web/uid-1")
    result = await crust(node, "policy", "explain", "--driver", DRIVER, *pod)
    assert result.exit_code == 1
    assert "[RuntimeClassNotAsked]" in result.output


async def test_policy_of_an_unknown_driver_names_the_known_ones(node: Node) -> None:
    result = await crust(node, "policy", "explain", "--driver", "other")
    assert result.exit_code == 1
    assert DRIVER in result.output


@pytest.mark.parametrize("words", [("--context", "novalue"), ("--context", "=x"), ("--pod", "web")])
async def test_policy_refuses_what_it_cannot_read(node: Node, words: tuple[str, ...]) -> None:
    result = await crust(node, "policy", "explain", "--driver", DRIVER, *words)
    assert result.exit_code == 2


async def test_proxy_that_is_not_there_exits_3() -> None:
    result = await asyncio.to_thread(
        CliRunner().invoke, main.main, ["explain", "--volume", "v", "--run-dir", "/nonexistent"]
    )
    assert result.exit_code == 3
    assert "/nonexistent/inspect.sock" in result.output
