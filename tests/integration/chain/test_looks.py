"""How many looks at the open files of all processes a step of a volume's life takes (docs/decisions/0040)."""

from collections.abc import Awaitable, Callable

import pytest

from tests.support.measures.looks import counted
from tests.support.nodes.served_node import BlockNode

pytestmark = pytest.mark.root


async def test_host_publish_takes_no_look_and_others_one(
    chain: BlockNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = counted(monkeypatch)

    async def count(step: Callable[[], Awaitable[object]]) -> int:
        looks.clear()
        await step()
        return len(looks)

    target = chain.places.target("one")
    volume = await chain.volume()
    counts = {
        "host publish": await count(lambda: chain.publish(volume, target, defer=False)),
        "host unpublish": await count(lambda: chain.unpublish(volume, target)),
        "publish": await count(lambda: chain.publish(volume, target)),
        "again": await count(lambda: chain.publish(volume, target)),
    }
    looks.clear()
    with chain.sandbox(target):
        counts["claim"] = len(looks)
    counts["unpublish"] = await count(lambda: chain.unpublish(volume, target))
    counts["unstage"] = await count(lambda: chain.unstage(volume))
    nothing = ("host publish", "host unpublish", "again", "unstage")
    assert counts == {**dict.fromkeys(nothing, 0), "publish": 1, "claim": 1, "unpublish": 1}
