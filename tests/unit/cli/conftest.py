"""The command against a node."""

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from crust.cli import main
from tests.support.nodes.fake_node import FakeNode


@pytest.fixture
def root(short_dir: Path) -> Path:
    """Where the files of a node are."""
    return short_dir


async def invoked(*words: str, answer: str = "") -> Result:
    """The command in a thread: it has an event loop of its own. `answer` is typed."""
    return await asyncio.to_thread(CliRunner().invoke, main.main, words, input=answer)


async def crust(node: FakeNode, *words: str) -> Result:
    """The command of the node."""
    return await invoked(*words, "--run-dir", node.places.run)
