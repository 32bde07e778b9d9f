"""A short directory, a node in it, and the command against the node."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from crust.cli import main
from tests.support.nodes.node import Node, Places


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="crust-") as path:
        yield Path(path)


@pytest.fixture
def places(root: Path) -> Places:
    """Where a node has its things."""
    return Places.make(str(root))


async def invoked(*words: str, answer: str = "") -> Result:
    """The command in a thread: it has an event loop of its own. `answer` is typed."""
    return await asyncio.to_thread(CliRunner().invoke, main.main, words, input=answer)


async def crust(node: Node, *words: str) -> Result:
    """The command of the node."""
    return await invoked(*words, "--run-dir", node.places.run)
