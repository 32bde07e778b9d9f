"""The engines of the driver: every one that can be set is made."""

from typing import get_args

from crust.blockdriver import serve
from crust.blockdriver.settings import LOCAL_ENGINES, DriverSettings


def test_every_engine_that_can_be_set_is_made() -> None:
    engines = get_args(DriverSettings.model_fields["engine"].annotation)
    assert serve.ENGINES.keys() == set(engines)
    assert set(engines) > LOCAL_ENGINES
