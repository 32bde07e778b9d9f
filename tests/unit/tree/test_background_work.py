"""The shipped packages start no task that nobody awaits, and no thread that nobody watches."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiofiles
import pytest

import crust
from tests.support import default_executor
from tests.support.tree import sources

TASKS_THAT_ARE_AWAITED = {
    "crust/blockdriver/pool_watch.py",  # one look, shielded
    "crust/inspection/daemon_calls.py",  # a command, which waits for the first of several streams
    "crust/inspection/screen.py",  # a command, which waits for the first of two
    "crust/cli/programs/daemons.py",
    "crust/csi_shim/deferral.py",  # the undo of a call, shielded
    "crust/host/process/commands.py",
    "crust/kata/statistics.py",  # one request, shielded
    "crust/core/operations.py",
    "crust/host/process/workers.py",  # one call, for aiofiles, which awaits it
    "crust/rpc/csi_driver.py",  # one question
    "crust/rpc/port.py",  # a connection's state
    "conformance/crust_conformance/runtimes/runtime_process.py",  # a command, which waits for the first of two
    "crust/core/supervised.py",
    "crust/kata/gate.py",  # the withdrawal for ended containers, which logs its errors
    "crust/kata/volume_work.py",  # the work of one call, which goes on where its time is over
    "crust/kata/nri.py",  # the calls of the engine, until the connection ends
}
"""Files with tasks that are no loop: their makers wait for them, and get their errors."""


def _started_tasks(path: Path) -> Iterator[int]:
    """Lines that start a task; a TaskGroup's are awaited by its block."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            is_loop = isinstance(owner, ast.Call) or (
                isinstance(owner, ast.Name) and owner.id in ("asyncio", "loop")
            )
            if node.func.attr in ("create_task", "ensure_future") and is_loop:
                yield node.lineno


def test_no_other_file_of_crust_starts_a_background_task() -> None:
    starting = {path for path, file in sources() if any(_started_tasks(file))}
    assert starting <= TASKS_THAT_ARE_AWAITED


def test_crust_uses_no_threads_that_nobody_watches() -> None:
    words = (
        "asyncio.to_thread(",
        "run_in_executor(",
        "set_default_executor(",
        "ThreadPoolExecutor(",
    )
    users = {
        path
        for path, file in sources()
        if any(word in file.read_text(encoding="utf-8") for word in words)
    }
    assert users == set()


async def test_event_loops_own_threads_refuse_a_library_of_crust(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    source = "async def read(path):\n    async with aiofiles.open(path): pass"
    names: dict[str, Any] = {"aiofiles": aiofiles}
    exec(compile(source, str(Path(crust.__file__).parent / "reader.py"), "exec"), names)
    with pytest.raises(default_executor.DefaultExecutorUsed, match=r"crust/reader\.py"):
        await names["read"](tmp_path / "file")
    async with aiofiles.open(tmp_path / "file"):  # a test may
        pass
