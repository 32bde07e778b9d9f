"""crust.handoff.layout: where the files of an entry are."""

import pytest

from crust.handoff import layout
from crust.handoff.layout import Layout
from tests.support.records.records import TARGET


@pytest.mark.spec("H-1")
def test_entry_is_named_by_digest_of_target_path() -> None:
    entry = Layout("/r").entry(TARGET)
    assert entry.directory == f"/r/{TARGET.digest}"
    assert entry == Layout("/r").entry(TARGET.digest)
    assert entry.record == f"/r/{TARGET.digest}/mountInfo.json"
    assert entry.claim_lock == f"/r/{TARGET.digest}/claim.lock"


@pytest.mark.parametrize("key", ["", "abc", "../" + "a" * 61, "A" * 64, "a" * 63 + "/", "a" * 65])
def test_entry_refuses_a_name_that_is_not_a_digest(key: str) -> None:
    with pytest.raises(ValueError, match="not an entry's name"):
        Layout("/r").entry(key)


@pytest.mark.spec("H-2")
def test_names_for_building_and_removing_are_hidden_and_temporary() -> None:
    names = Layout("/r")
    for path in (names.new_staging(TARGET.digest), names.new_gone(TARGET.digest)):
        name = path.removeprefix("/r/")
        assert layout.is_hidden(name)
        assert layout.is_temporary(name)
    assert names.new_staging(TARGET.digest) != names.new_staging(TARGET.digest)
