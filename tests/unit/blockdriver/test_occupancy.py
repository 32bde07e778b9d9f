"""Which images are counted again, and that nothing that changed is left out."""

from dataclasses import dataclass, field

import pytest

from crust import volumes
from crust.blockdriver.engines.files.occupancy import SETTLING_S, Occupancy
from crust.host.files.owned import Owned

A, B, C = (volumes.VolumeId(name) for name in "abc")


@dataclass
class Pool:
    """Images, a clock, and who was counted."""

    images: dict[volumes.VolumeId, Owned] = field(default_factory=dict)
    now_s: float = 1000.0
    counted: list[volumes.VolumeId] = field(default_factory=list)

    def count(self, volume_id: volumes.VolumeId) -> Owned | None:
        self.counted.append(volume_id)
        return self.images.get(volume_id)


@pytest.fixture
def pool() -> Pool:
    return Pool({A: Owned(10, shares=False), B: Owned(0, shares=False), C: Owned(5, shares=True)})


@pytest.fixture
def occupancy(pool: Pool) -> Occupancy:
    made = Occupancy(lambda: pool.now_s)
    made.recount(pool.images)
    assert made.now((), pool.count) == {A: 10, C: 5}
    pool.counted.clear()
    return made


def test_what_nobody_touched_is_not_counted_again(pool: Pool, occupancy: Occupancy) -> None:
    assert occupancy.now((), pool.count) == {A: 10, C: 5}
    assert pool.counted == []


def test_what_was_touched_is_counted_once_and_what_is_attached_every_time(
    pool: Pool, occupancy: Occupancy
) -> None:
    pool.images |= {A: Owned(20, shares=False), B: Owned(30, shares=False)}
    occupancy.touched(A)
    assert occupancy.now((B,), pool.count) == {A: 20, B: 30, C: 5}
    pool.images[B] = Owned(40, shares=False)
    assert occupancy.now((B,), pool.count) == {A: 20, B: 40, C: 5}
    assert pool.counted.count(A) == 1


def test_what_is_gone_is_not_counted_on(pool: Pool, occupancy: Occupancy) -> None:
    del pool.images[A]
    occupancy.deleted(A)
    assert occupancy.now((), pool.count) == {C: 5}


def test_what_shares_blocks_is_counted_after_a_deletion_until_its_blocks_are_given_back(
    pool: Pool, occupancy: Occupancy
) -> None:
    occupancy.deleted()
    assert occupancy.now((), pool.count) == {A: 10, C: 5}
    pool.images[C] = Owned(8, shares=True)  # in the background
    assert occupancy.now((), pool.count) == {A: 10, C: 8}
    pool.now_s += SETTLING_S
    pool.images[C] = Owned(9, shares=True)
    assert occupancy.now((), pool.count) == {A: 10, C: 9}
    pool.counted.clear()
    occupancy.now((), pool.count)
    assert pool.counted == []


def test_a_recount_finds_what_changed_without_a_word(pool: Pool, occupancy: Occupancy) -> None:
    pool.images |= {A: Owned(11, shares=False), B: Owned(1, shares=False)}
    occupancy.recount(pool.images)
    assert occupancy.now((), pool.count) == {A: 11, B: 1, C: 5}
