"""A driver on an engine in memory, whose pool is open."""

from pathlib import Path

import pytest

from crust.blockdriver.controller.create_volume import Provisioner
from crust.blockdriver.driver import Driver
from tests.support.drivers import driver_state


@pytest.fixture
def state(tmp_path: Path) -> Driver:
    return driver_state.opened(tmp_path)


@pytest.fixture
def provisioner(state: Driver) -> Provisioner:
    return state.controller.provisioner
