"""Ten seeds of a node's life under a simulated kubelet: pods come and go while processes die.

What a seed does and what must hold is in tests/support/nodes/simulation.py; docs/reliability.md has figures of more
seeds.
"""

import pytest

from tests.support.nodes import simulation


@pytest.mark.parametrize("seed", range(10))
async def test_simulated_node_leaks_nothing_under_a_final_code(seed: int) -> None:
    figures = await simulation.simulate(seed)
    assert figures.faults == []
    assert figures.counts["NodePublishVolume OK"] > 0, "a run in which nothing ran proves nothing"
