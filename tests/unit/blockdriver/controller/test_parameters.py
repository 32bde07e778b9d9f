"""The parameters of a StorageClass for crust's own driver."""

import pytest

from crust.blockdriver.controller import class_parameters
from crust.deferral_keys import DEFER, Defer
from crust.host.filesystems import supported


@pytest.mark.parametrize("value", Defer)
def test_every_value_of_defer_is_accepted_and_reaches_later_calls(value: Defer) -> None:
    """`runtime-class` was refused, though it is the proxy that decides, for every driver alike."""
    read = class_parameters.parse({DEFER: value.value}, supported.SUPPORTED)
    assert read.volume_context == {DEFER: value.value}


def test_other_value_of_defer_is_refused_with_the_allowed_ones() -> None:
    with pytest.raises(class_parameters.InvalidParameter, match="always, never, runtime-class"):
        class_parameters.parse({DEFER: "Always"}, supported.SUPPORTED)
