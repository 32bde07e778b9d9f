"""The driver as a process that is killed with -9 at any moment, and a CO that retries until it has an answer."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from crust.blockdriver.settings import DEFAULT_POOL
from tests.support.co import Answer, Co
from tests.support.faults.refusals import repeated
from tests.support.processes import Program

_RETRIED = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.FAILED_PRECONDITION,  # a killed driver's mkfs still has the device
)


class KilledDriver:
    """A driver below `root`, started again whenever it was killed. Its pool is in the directory `root/pool`, another
    one in a directory of its name.
    """

    def __init__(self, root: Path, *further: str) -> None:
        self.root = root
        self.homes = {DEFAULT_POOL: root / "pool", **{name: root / name for name in further}}
        """The directory above the state of each pool, by the pool's name."""
        self.socket = str(root / "csi.sock")
        self.answered = 0
        self._answers = asyncio.Condition()
        arguments = {
            "socket": "csi.sock",
            "state-dir": "pool/state",
            "run-dir": "run",
            "target-root": "",
        }
        flags = [f"--{name}={root / path}" for name, path in arguments.items()]
        flags += ["--no-check-propagation", "--create-pool", "--node-id=node-1"]
        config = root / "driver.toml"
        tables = (
            f'pools.{name} = {{state_dir = "{root / name}/state", pool_id_file = "{root / name}.pool-id"}}\n'
            for name in further
        )
        config.write_text("".join(tables))
        flags.append(f"--config={config}")
        self._program = Program(root, "driver", ("crust", "driver", *flags), root / "log")

    def start(self) -> None:
        """Start it; callers wait for the socket."""
        self._program.start()

    def kill(self) -> None:
        """kill -9, and wait until it is dead. Nothing can cut it short: there is never a second driver."""
        self._program.kill()

    async def count(self) -> None:
        async with self._answers:
            self.answered += 1
            self._answers.notify_all()

    async def wait_for(self, answered: int) -> None:
        """Return when so many calls were answered."""
        async with self._answers:
            await self._answers.wait_for(lambda: self.answered >= answered)


class RetryingCo(Co):
    """Calls a driver that may die at any moment, and retries as a CO does."""

    def __init__(self, driver: KilledDriver, connected: grpc.aio.Channel) -> None:
        super().__init__(connected, waits=True)
        self._driver = driver

    async def _call(
        self, method: Callable[..., Awaitable[Answer]], request: Any, timeout_s: float | None = None
    ) -> Answer:
        """Raises the errors that a CO does not retry, and a refusal that does not end."""
        call = super()._call
        answer = await repeated(lambda: call(method, request, timeout_s), *_RETRIED, within_s=300)
        await self._driver.count()
        return answer
