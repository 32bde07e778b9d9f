"""The event loop's own threads refuse the calls of crust, also those that a library makes for it.

asyncio.run() and the end of the process wait for these threads, and nothing bounds or watches them: see
crust/host/process/workers.py.
"""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import crust

_CRUST = str(Path(crust.__file__).parent)
_TESTS = str(Path(__file__).parents[1])
_LOOP = asyncio.events.__file__


class DefaultExecutorUsed(AssertionError):
    """Crust's code would run on the event loop's own threads."""


@contextmanager
def refusing() -> Iterator[None]:
    """Raise `DefaultExecutorUsed` for each call of crust inside the block that names no executor."""
    original = asyncio.BaseEventLoop.run_in_executor

    def run_in_executor(loop: Any, executor: Any, *call: Any) -> Any:
        if executor is None and (caller := _caller()):
            raise DefaultExecutorUsed(f"{caller} runs {call[0]} on the event loop's own threads")
        return original(loop, executor, *call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.BaseEventLoop, "run_in_executor", run_in_executor)
        yield


def _caller() -> str:
    """The file of crust that calls, in this step of a task; empty if a test does, or a part of one below crust."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename != _LOOP:
        name = frame.f_code.co_filename
        if name.startswith((_CRUST, _TESTS)):
            return name if name.startswith(_CRUST) else ""
        frame = frame.f_back
    return ""
