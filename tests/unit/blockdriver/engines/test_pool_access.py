"""The ids of a pool."""

import pytest

from crust.blockdriver.engines.pool_access import PoolIds, set_of
from tests.support.raised import raised

IDS = PoolIds("0123456789abcdef")
OTHERS = PoolIds("fedcba9876543210")


def test_ids_name_pool_and_kind_in_40_to_64_characters() -> None:
    ids = [IDS.volume_id("a"), IDS.snapshot_id("a"), IDS.group_id("a")]
    assert all(volume_or_set_id.startswith("0123456789abcdef-") for volume_or_set_id in ids)
    assert all(40 <= len(volume_or_set_id) <= 64 for volume_or_set_id in ids)
    kinds = (IDS.is_volume_id, IDS.is_snapshot_id, IDS.is_group_id)
    kinds_of = [[is_kind(volume_or_set_id) for is_kind in kinds] for volume_or_set_id in ids]
    assert kinds_of == [[True, False, False], [False, True, False], [False, False, True]]


@pytest.mark.parametrize("text", ["", "vol-1", "\n", "a" * 57, f"{'0' * 16}-vol-{'0' * 40}"])
def test_ids_of_unknown_form_belong_to_no_pool(text: str) -> None:
    assert not IDS.is_volume_id(text)
    assert not IDS.is_volume_id(IDS.volume_id("a") + (text or "0"))
    IDS.check_own_pool(text)


def test_ids_of_another_pool_are_known_as_such() -> None:
    for foreign in (OTHERS.volume_id("a"), OTHERS.snapshot_id("a"), OTHERS.group_id("a")):
        assert not any(
            is_kind(foreign) for is_kind in (IDS.is_volume_id, IDS.is_snapshot_id, IDS.is_group_id)
        )
        with raised("IdOfOtherPool", match="0123456789abcdef"):
            IDS.check_own_pool(foreign)
    IDS.check_own_pool(IDS.volume_id("a"))


def test_member_id_is_that_of_no_single_snapshot() -> None:
    volume_id = IDS.volume_id("v")
    member = IDS.member_id("g", volume_id)
    names = ["g", f"g{volume_id}", f"g/{volume_id}", volume_id, f"g {volume_id}"]
    assert member not in {IDS.snapshot_id(name) for name in names}
    assert (IDS.is_snapshot_id(member), IDS.is_set_id(member)) == (True, False)
    assert set_of(member) == IDS.group_id("g")
    assert set_of(IDS.snapshot_id("g")) == IDS.snapshot_id("g")
    assert member != IDS.member_id("g", IDS.volume_id("w"))
    assert member != IDS.member_id("h", volume_id)
