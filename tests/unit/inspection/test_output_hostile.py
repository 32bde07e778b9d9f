"""Text that others wrote is escaped on every output."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from crust.core import volumes
from crust.handoff import claims, layout
from tests.support.kata.orphan import ORPHANED
from tests.support.nodes.commands import crust, published
from tests.support.nodes.fake_node import FakeNode

HOSTILE = "guest \x1b[2J\x1b]0;owned\x07\x9b31m \u202egnp.exe\nvolume      forged \x7f"


@pytest.mark.parametrize(
    "words",
    [
        ["explain", "--volume", "vol-1"],
        ["describe", "vol-1"],
        ["describe", "vol-1", "-o", "json"],
        ["volumes", "-o", "wide"],
        ["volumes", "-o", "json"],
        ["volumes", "-o", "yaml"],
        ["status"],
        ["doctor"],
        ["end-orphan", "vol-1"],
        ["describe", HOSTILE],
        ["explain", "--target", HOSTILE],
        ["explain", HOSTILE],
    ],
    ids=lambda words: " ".join(words).partition("guest")[0],
)
async def test_hostile_text_is_escaped_on_every_output(node: FakeNode, words: list[str]) -> None:
    target = await published(node)
    path = volumes.TargetPath.parse(target)
    paths = layout.Layout(f"{node.places.run}/volumes").entry(path)
    with claims.ClaimLock.acquire(paths, path):
        claims.write(paths, replace(ORPHANED, error=HOSTILE))
        output = (await crust(node, *words)).output
        written = Path(paths.claim).read_text(encoding="utf-8")
        of_another = json.dumps(json.loads(written) | {"sandbox_id": f"box{HOSTILE}"})
        Path(paths.claim).write_text(of_another, encoding="utf-8")  # which no reader takes
        output += (await crust(node, *words)).output
    assert [line for line in output.splitlines() if not line.isprintable()] == []
    assert not any(line.startswith("volume      forged") for line in output.splitlines())
