"""A registration that is refused."""

import asyncio
import logging
from pathlib import Path

import pytest

from crust.core import errors, volumes
from crust.runtime_handler import registration
from crust_conformance.runtimes import testing


@pytest.fixture
def run_dir(short_dir: Path) -> str:
    return str(short_dir)


async def test_refused_registration_raises_one_error_and_logs_its_sentence(
    run_dir: str, caplog: pytest.LogCaptureFixture
) -> None:
    where, words = f"{run_dir}/handlers.sock", "filesystems is empty"
    request = registration.RegisterRequest(
        volumes.HandlerName("box"), "1", "/run/box.sock", frozenset()
    )
    async with testing.serving(run_dir):
        with caplog.at_level(logging.WARNING), pytest.raises(errors.InvalidRequest, match=words):
            async with registration.Registration(where, request):
                await asyncio.Event().wait()
    (line,) = [
        record.getMessage() for record in caplog.records if "not registered" in record.getMessage()
    ]
    assert where in line
    assert "box" in line
    assert words in line
