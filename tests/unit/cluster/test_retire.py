"""What an operator may retire, at one moment; the stores' contract has the rest."""

import pytest

from crust.cluster import retirement
from crust.cluster.retirement import Known

A, B = f"{1:016x}", f"{2:016x}"


def test_node_is_retired_with_the_pools_that_it_announced_last() -> None:
    known = Known({}, {A: "n1", B: "n2"}, {})
    assert retirement.of_node(known, "n1") == (A,)


def test_node_whose_announcement_cannot_be_read_is_connected_all_the_same() -> None:
    with pytest.raises(retirement.NodeStillConnected):
        retirement.of_node(Known({"n1": ""}, {A: "n1"}, {}), "n1")


def test_node_whose_pool_another_connected_node_announces_is_not_retired() -> None:
    with pytest.raises(retirement.PoolStillAnnounced):
        retirement.of_node(Known({"n2": A}, {A: "n1"}, {}), "n1")


def test_node_that_was_retired_before_is_so_again_whoever_announces_its_pool() -> None:
    assert retirement.of_node(Known({"n2": A}, {A: "n2"}, {A: "n1"}), "n1") == (A,)


def test_pool_of_a_node_that_nobody_knows_may_be_retired_by_its_id() -> None:
    retirement.check_pool(Known({}, {}, {}), A)


def test_pool_that_is_announced_or_of_a_known_node_is_not_retired_by_its_id() -> None:
    with pytest.raises(retirement.PoolStillAnnounced):
        retirement.check_pool(Known({"n1": A}, {A: "n1"}, {}), A)
    with pytest.raises(retirement.PoolOfKnownNode):
        retirement.check_pool(Known({}, {A: "n1"}, {}), A)
