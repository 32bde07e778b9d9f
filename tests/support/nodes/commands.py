"""The command against a node."""

import asyncio

from click.testing import CliRunner, Result

from crust.cli import main
from tests.support.nodes.fake_node import FakeNode


async def invoked(*words: str, answer: str = "") -> Result:
    """The command in a thread: it has an event loop of its own. `answer` is typed."""
    return await asyncio.to_thread(CliRunner().invoke, main.main, words, input=answer)


async def crust(node: FakeNode, *words: str) -> Result:
    """The command of the node."""
    return await invoked(*words, "--run-dir", node.places.run)


async def published(node: FakeNode, volume: str = "vol-1", pod: str = "pod-1") -> str:
    """Publish a volume to a pod; its target path."""
    target = node.places.target(pod)
    await node.co.publish(volume, target)
    return target
