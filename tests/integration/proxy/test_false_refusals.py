"""Lives of a target beside processes that come and go: no answer is missing, and so nothing is refused.

`make test` runs the short form. `make false-refusals` sets TESTS_LIVES and TESTS_PROCESSES.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from crust.core import volumes
from crust.host.block import devices
from crust.runtime_handler.blocking import claim_volume
from tests.integration.conftest import MakeDevice
from tests.support.nodes.fake_node import FakeNode, node_on
from tests.support.nodes.places import Places

pytestmark = pytest.mark.root

LIVES = int(os.environ.get("TESTS_LIVES", "20"))
PROCESSES = int(os.environ.get("TESTS_PROCESSES", "100"))
SHORT_LIVED = """
import os, sys, time
living, count, is_ready = 0, int(sys.argv[1]), False
while True:
    while living < count:
        if os.fork() == 0:
            files = [os.dup(0) for _ in range(os.getpid() % 20)]
            time.sleep(os.getpid() % 1000 / 500)
            os._exit(0)
        living += 1
    if not is_ready:
        is_ready = print(end=".", flush=True) is None
    os.wait()
    living -= 1
"""
"""Children that live up to two seconds; a dot when all of them live for the first time."""


@pytest.fixture
def processes() -> Iterator[None]:
    """So many processes, of which each is replaced when it ends."""
    command = [sys.executable, "-IS", "-c", SHORT_LIVED, str(PROCESSES)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as parent:
        assert parent.stdout is not None
        try:
            assert parent.stdout.read(1) == b"."
            yield
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


@dataclass
class _Lives:
    """Publish, claim, release and unpublish of targets, each volume with a device of its own."""

    node: FakeNode
    devices: Mapping[str, str]
    left: int = LIVES

    def answered(self, method: str, request: Any, answer: Any) -> Any:
        """The driver's answer to a deferred publish, with the device of the volume."""
        if method == "NodePublishVolume":
            block, path = answer.deferred_mount.block_device, self.devices[request.volume_id]
            known = devices.identify(path)
            block.path, block.identity.disk_sequence = path, known.disk_sequence
            block.identity.major, block.identity.minor = known.major, known.minor
        return answer

    async def live(self, volume: str) -> None:
        """Live until no life is left."""
        target = self.node.places.target(volume)
        at = (
            volumes.TargetPath.parse(target),
            volumes.SandboxId(volume),
            volumes.HandlerName("kata"),
        )
        while self.left > 0:
            self.left -= 1
            await self.node.co.publish(volume, target)
            claim = await asyncio.to_thread(claim_volume, self.node.places.volumes, *at)
            await asyncio.to_thread(claim.release)
            await self.node.co.unpublish(volume, target)
            self.node.driver.calls.clear()


@pytest.mark.timeout(900 + LIVES)
@pytest.mark.usefixtures("processes")
async def test_no_life_of_target_is_refused_beside_short_lived_processes(
    places: Places, device: MakeDevice
) -> None:
    names = [f"vol-{number}" for number in range(1, 9)]
    by_volume = {name: device(name).path for name in names}
    async with node_on(by_volume["vol-1"], places) as node, node.handler():
        lives = _Lives(node, by_volume)
        node.driver.twist = lives.answered
        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(lives.live(name))
        for name in names:
            node.check_untouched(places.target(name))
