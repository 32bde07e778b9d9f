"""A device with a filesystem."""

import pytest

from tests.integration.host.conftest import Attach, run


@pytest.fixture
def disk(attach: Attach) -> str:
    device = attach()
    run("mkfs.ext4", "-q", device.path)
    return device.path
