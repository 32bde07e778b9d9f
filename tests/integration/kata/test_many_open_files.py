"""A node with many processes and open files: a container's creation and unpublishes stay within their deadlines.

`make test` runs the short form. `make false-refusals` sets TESTS_PROCESSES and TESTS_OPEN_FILES.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from crust.handoff.record import Record
from tests.integration.conftest import MakeDevice
from tests.integration.kata.conftest import ONE, KataNode, container, pod
from tests.support.kata.sandbox import StandInSandbox
from tests.support.nodes.fake_node import node_on
from tests.support.nodes.places import Places

pytestmark = pytest.mark.root

PROCESSES = int(os.environ.get("TESTS_PROCESSES", "100"))
OPEN_FILES = int(os.environ.get("TESTS_OPEN_FILES", "2000"))
UNPUBLISHES = 20
CREATE_S = 1.6
"""Of the two seconds that an engine waits by default, what the plugin uses."""
KUBELET_S = 120.0
"""A kubelet's deadline of an unpublish."""
OPENERS = """
import os, signal, sys
count, files = int(sys.argv[1]), int(sys.argv[2])
for _ in range(count):
    if os.fork() == 0:
        file = os.open("/", os.O_RDONLY)
        for number in range(files // count - 1):
            os.dup((0, file)[number % 2])
        os.write(1, b".")
        signal.pause()
signal.pause()
"""
"""Children with files open; a dot of each when it has them."""


@pytest.fixture
def open_files() -> Iterator[None]:
    """So many processes have so many files open."""
    command = [sys.executable, "-IS", "-c", OPENERS, str(PROCESSES), str(OPEN_FILES)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as parent:
        assert parent.stdout is not None
        try:
            assert len(parent.stdout.read(PROCESSES)) == PROCESSES
            yield
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


@pytest.mark.usefixtures("open_files")
async def test_create_and_unpublishes_stay_within_their_deadlines(
    node: KataNode, device: MakeDevice, one: StandInSandbox, places: Places
) -> None:
    record, path = node.publish("a", device("a").path), device("b").path
    targets = {f"vol-{number}": places.target(f"t{number}") for number in range(UNPUBLISHES)}
    async with node_on(path, places) as proxy, proxy.handler():
        for volume, target in targets.items():
            await proxy.co.publish(volume, target, readonly=True)  # readers share the device
        async with asyncio.TaskGroup() as group:
            group.create_task(_create(node, record))
            for volume, target in targets.items():
                group.create_task(proxy.co.unpublish(volume, target, timeout_s=KUBELET_S))
    claim = node.claim(record)
    assert claim is not None
    assert (claim.live, claim.sandbox_id) == (True, one.id)


async def _create(node: KataNode, record: Record) -> None:
    deadline_s = time.monotonic() + CREATE_S
    await node.bridge().create(pod(ONE), container(record.target.text), deadline_s)
