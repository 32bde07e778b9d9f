"""The private directories that earlier commits made are those that the present shim makes: it finds each of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import capabilities
from tests.support.records import freeze_node, frozen_nodes
from tests.support.records.frozen_pools import Frozen

pytestmark = pytest.mark.root

TREE = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def root(tmp_path: Path) -> Iterator[None]:
    capabilities.need("mount", "loop")
    with frozen_nodes.root_at(str(tmp_path)):
        yield


def record(frozen: Frozen) -> dict[str, str | None]:
    """The paths, with the modes of the directories: at a leaf is the device, whose mode is the driver's."""
    return {path: of.mode if of.size is None else None for path, of in frozen.items()}


@pytest.mark.parametrize("kind", ["cloud", "stateful"])
async def test_private_directories_are_those_of_earlier_commits(kind: str) -> None:
    made = record(await freeze_node.wrapped(TREE, kind))
    assert len(made) == 3
    for commit in frozen_nodes.COMMITS:
        assert record(frozen_nodes.load(commit).parts[kind]) == made
