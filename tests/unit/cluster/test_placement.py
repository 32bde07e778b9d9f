"""Which nodes can take a volume, and in which order."""

from typing import Any

import pytest

from crust.cluster.central import placement
from crust.cluster.central.placement import NoNodeConnected, NoNodeForVolume, Wanted, choose
from crust.cluster.protocol import Announcement
from tests.support.cluster.cluster_contract import announcement

GIB = 1 << 30


def nodes(*names: str, **but: Any) -> list[Announcement]:
    return [announcement(each, **but) for each in names]


def chosen(wanted: Wanted, candidates: list[Announcement]) -> list[str]:
    return [each.node_id for each in choose(wanted, candidates)]


def at(node: str) -> dict[str, str]:
    return {"crust.dev/node": node}


def test_requisite_topology_leaves_other_nodes_out() -> None:
    wanted = Wanted("volume-1", requisite=[at("n2"), at("n3")])
    assert set(chosen(wanted, nodes("n1", "n2", "n3"))) == {"n2", "n3"}


def test_preferred_topologies_come_first_in_their_order() -> None:
    wanted = Wanted("volume-1", preferred=[at("n3"), at("n1")])
    assert chosen(wanted, nodes("n1", "n2", "n3"))[:2] == ["n3", "n1"]
    assert len(chosen(wanted, nodes("n1", "n2", "n3"))) == 3


@pytest.mark.parametrize("number", range(20))
def test_preference_is_stronger_than_free_capacity(number: int) -> None:
    full, empty = announcement("n1", capacity_bytes=2), announcement("n2", capacity_bytes=GIB)
    wanted = Wanted(f"volume-{number}", preferred=[at("n1")], required_bytes=1)
    assert chosen(wanted, [full, empty]) == ["n1", "n2"]


@pytest.mark.parametrize(
    "but",
    [
        {"capacity_bytes": GIB - 1},
        {"maximum_bytes": GIB - 1},
        {"volumes": 5, "max_volumes": 5},
        {"is_ready": False},
    ],
)
def test_node_that_cannot_take_the_volume_is_left_out(but: dict[str, Any]) -> None:
    wanted = Wanted("volume-1", required_bytes=GIB)
    assert chosen(wanted, [announcement("n1", **but), announcement("n2")]) == ["n2"]


def test_full_node_that_has_freed_something_since_comes_after_those_with_free_capacity() -> None:
    wanted = Wanted("volume-1", required_bytes=GIB)
    full = announcement("n1", capacity_bytes=0)
    both = choose(wanted, [full, announcement("n2")], {full.pool_id})
    assert [each.node_id for each in both] == ["n2", "n1"]
    assert choose(wanted, [full], {full.pool_id}) == (full,)


def test_node_that_has_freed_something_is_left_out_of_a_topology_that_it_is_not_in() -> None:
    wanted = Wanted("volume-1", requisite=[at("n2")])
    full = announcement("n1", capacity_bytes=0)
    with pytest.raises(NoNodeForVolume):
        choose(wanted, [full], {full.pool_id})


def test_full_node_is_left_out_also_without_a_size() -> None:
    assert chosen(Wanted("v"), [announcement("n1", capacity_bytes=0), announcement("n2")]) == ["n2"]


def test_segments_are_compared_without_the_case_of_keys() -> None:
    assert placement.is_in({"crust.dev/Node": "n1"}, {"crust.dev/node": "n1"})
    assert not placement.is_in({"crust.dev/node": "N1"}, {"crust.dev/node": "n1"})
    assert not placement.is_in({"crust.dev/node": "n1"}, {"crust.dev/node": "n1", "zone": "a"})


def test_refusal_counts_the_reasons() -> None:
    candidates = [
        announcement("n1", capacity_bytes=1),
        announcement("n2", is_ready=False),
        announcement("n3", capacity_bytes=1),
    ]
    with pytest.raises(NoNodeForVolume) as raised:
        choose(Wanted("v", required_bytes=GIB), candidates)
    assert raised.value.why == "of 3 connected nodes: 2 without the capacity, 1 without its pool"


def test_refusal_without_nodes_says_so() -> None:
    with pytest.raises(NoNodeConnected):
        choose(Wanted("v"), [])


def test_same_name_meets_the_same_node_in_any_order_of_announcements() -> None:
    candidates = nodes("n1", "n2", "n3", "n4")
    for number in range(50):
        wanted = Wanted(f"volume-{number}")
        assert chosen(wanted, candidates) == chosen(wanted, candidates[::-1])


def test_names_spread_in_proportion_to_free_capacity() -> None:
    candidates = [
        announcement("n1", capacity_bytes=GIB, maximum_bytes=GIB),
        announcement("n2", capacity_bytes=3 * GIB, maximum_bytes=GIB),
    ]
    first = [chosen(Wanted(f"volume-{number}"), candidates)[0] for number in range(4000)]
    assert 0.70 < first.count("n2") / 4000 < 0.80


def test_lost_node_moves_only_its_own_names() -> None:
    candidates = nodes("n1", "n2", "n3")
    for number in range(200):
        wanted = Wanted(f"volume-{number}")
        before = chosen(wanted, candidates)
        after = chosen(wanted, candidates[:2])
        assert after == [each for each in before if each != "n3"]
