"""Nodes in short directories: a socket's path may have 107 bytes, and pytest's own directories use most of them."""

import tempfile
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.nodes import node as nodes


@pytest.fixture
def places() -> Iterator[nodes.Places]:
    """An empty node's directories."""
    with tempfile.TemporaryDirectory(prefix="crust-") as root:
        yield nodes.Places.make(root)


@pytest.fixture
async def node(places: nodes.Places) -> AsyncIterator[nodes.Node]:
    """A node without a handler."""
    async with nodes.running(places) as running:
        yield running


@pytest.fixture
async def kata(node: nodes.Node) -> AsyncIterator[nodes.Node]:
    """A node with one handler that has all features."""
    async with node.handler():
        yield node
