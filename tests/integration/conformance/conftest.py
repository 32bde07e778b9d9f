"""Where the drivers under test live."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from crust.host.block import loop


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory whose name is short enough for sockets; what a failed case left attached is detached."""
    with tempfile.TemporaryDirectory(prefix="crust-") as name:
        yield Path(name)
        for device in loop.list_named(lambda _: True):
            if device.backing.startswith(f"{name}/"):
                loop.detach(device)
