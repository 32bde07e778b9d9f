"""The topology of a volume."""

import pytest

from crust.blockdriver.controller import topology
from tests.support.drivers import driver_state

HERE = topology.segments({topology.KEY: driver_state.NODE})


def test_create_with_invalid_topology_is_refused() -> None:
    for bad in (
        {},
        {"a/b/c": "x"},
        {"Crust.dev/node": "a", "crust.dev/node": "b"},
        {topology.KEY: ""},
        {topology.KEY: "x" * 64},
        {topology.KEY: "-x"},
        {"n" * 64: "x"},
    ):
        with pytest.raises(topology.InvalidTopology):
            topology.segments(bad)
    with pytest.raises(topology.InvalidTopology):
        topology.is_met([dict(HERE)], [{topology.KEY: "node-2"}], driver_state.NODE)
    assert topology.segments({"CRUST.dev/Node": driver_state.NODE}) == HERE


@pytest.mark.parametrize("node_id", ["node-1", "x" * 256, "ü", "a/b", "-"])
def test_topology_value_of_any_node_id_is_valid(node_id: str) -> None:
    value = topology.value_of(node_id)
    assert topology.segments({topology.KEY: value}) == ((topology.KEY, value),)
