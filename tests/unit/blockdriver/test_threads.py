"""Blocking calls of the driver use the threads of its engine, not those of the process."""

from pathlib import Path

import crust

_ROOT = Path(crust.__file__).parent
_BEFORE_THERE_IS_AN_ENGINE = [
    "blockdriver/pool_watch.py",
    "blockdriver/serve.py",
]


def test_driver_and_its_tools_use_no_threads_of_the_process() -> None:
    files = [*_ROOT.glob("blockdriver/**/*.py"), *_ROOT.glob("host/filesystems/*.py")]
    users = [
        str(each.relative_to(_ROOT))
        for each in files
        if "asyncio.to_thread(" in each.read_text() or "run_in_executor(" in each.read_text()
    ]
    assert sorted(users) == _BEFORE_THERE_IS_AN_ENGINE
