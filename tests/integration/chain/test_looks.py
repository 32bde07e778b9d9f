"""How many looks at the open files of all processes a step of a volume's life takes (docs/decisions/0040)."""

from collections.abc import Awaitable, Callable

import pytest

from crust.host.block import openers
from tests.support.nodes.served_node import BlockNode

pytestmark = pytest.mark.root


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number for each look."""
    made: list[int] = []
    look = openers._all_openers

    def counted() -> openers.Openers:
        made.append(1)
        return look()

    monkeypatch.setattr(openers, "_all_openers", counted)
    return made


async def test_host_publish_takes_no_look_and_others_one(
    chain: BlockNode, looks: list[int]
) -> None:
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
