"""crust.handoff.mount_info_models: what a record that cannot be read reserves."""

import pytest

from crust.handoff import mount_info_models
from tests.support.records.records import IMAGE, TARGET, a_record


@pytest.mark.spec("H-50")
def test_unreadable_record_of_an_image_reserves_the_image() -> None:
    reserved = mount_info_models.reserved(a_record(source=IMAGE).to_bytes(), TARGET.digest)
    assert reserved is not None
    assert reserved.device == IMAGE
