"""What holds for every test: needed capabilities are probed, and a test with root leaves nothing behind."""

import gc
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blockbuster
import hypothesis
import pytest

from tests.support import capabilities, dead_workers, default_executor, leaks, trees
from tests.support.nodes.places import Places

# Else an example that takes longer than 200 ms fails, as on a busy machine any may.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker's end is explained where it was not ordered."""
    if error:
        sys.stderr.write(f"\n{dead_workers.obituary(node)}\n")


@pytest.fixture
def strict_event_loop() -> Iterator[None]:
    """Any blocking call that code of crust makes on an event loop's thread raises.

    For tests that enter crust through its coroutines only: a test that itself calls a plain function of
    `crust.host` from a coroutine would be reported as the cause.
    """
    # gRPC joins its poller where the garbage collector meets the last of its objects: that must not be in here
    gc.collect()
    gc.disable()
    try:
        with blockbuster.blockbuster_ctx("crust") as calls:
            # until the new process has executed its program, which asyncio waits for on the loop's thread too
            calls.functions["os.read"].can_block_in("subprocess.py", {"_execute_child"})
            yield
    finally:
        gc.enable()


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory for sockets: unix(7) allows paths of 107 bytes, and pytest's own directories are long."""
    with trees.temporary("crust-") as name:
        yield Path(name)


@pytest.fixture
def places(short_dir: Path) -> Places:
    """The paths of a new node."""
    return Places.make(str(short_dir))


@pytest.fixture
def logging_restored() -> Iterator[None]:
    """The root logger has its handlers and its level again."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True, scope="session")
def _no_default_executor() -> Iterator[None]:
    """See tests/support/default_executor.py."""
    with default_executor.refusing():
        yield


@pytest.fixture(autouse=True)
def _capable_and_clean(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Tests marked `root` or `vm` run where they can, alone with their mounts, and are searched for leaks."""
    markers = [
        marker for marker in capabilities.OF_MARKER if request.node.get_closest_marker(marker)
    ]
    if not markers:
        yield
        return
    for marker in markers:
        capabilities.need(*capabilities.OF_MARKER[marker])
    with leaks.checked(Path(tmp_path_factory.getbasetemp())):
        yield
