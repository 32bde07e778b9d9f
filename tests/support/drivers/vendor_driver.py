"""A driver of examples/drivers, or a public one, in a process: started, killed, told to misbehave, read."""

import base64
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2
from examples.drivers import cloud, disks, minimal, stateful
from tests.support.drivers import hostile_driver
from tests.support.third_party import ember

NODE = "node-1"
NAMES = {
    "cloud": cloud.NAME,
    "minimal": minimal.NAME,
    "stateful": stateful.NAME,
    "ember": ember.NAME,
    "hostile": minimal.NAME,
}
"""What each of them calls itself."""
MODULES = {"ember": ember.__name__, "hostile": hostile_driver.__name__}
"""Of those that are not in examples/drivers."""
START_S = 60.0


@dataclass
class VendorDriver:
    """One driver, by a key of `NAMES`; only those of examples/drivers can be told to misbehave."""

    kind: str
    socket: str
    state_dir: str
    code: Path = Path(__file__).parents[3]
    """The directory with the package `examples`."""
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _hanging: int = field(default=-1, init=False)
    _released: int = field(default=-1, init=False)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        module = MODULES.get(self.kind, f"examples.drivers.{self.kind}")
        command = [sys.executable, "-m", module]
        arguments = [
            f"--socket={self.socket}",
            f"--state-dir={self.state_dir}",
            f"--node-id={NODE}",
        ]
        self.process = subprocess.Popen([*command, *arguments], cwd=self.code)
        with grpc.insecure_channel(f"unix:{self.socket}", channel.OPTIONS) as connected:
            grpc.channel_ready_future(connected).result(timeout=START_S)

    def kill(self) -> None:
        """kill -9, and wait."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def wait(self) -> None:
        """Wait until it has died by itself."""
        assert self.process is not None
        self.process.wait(timeout=START_S)
        self.process = None

    def misbehave(self, **switches: str) -> None:
        """What it does wrong from now on, by method; nothing if there are none."""
        path = f"{self.state_dir}/switches.json"
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump(switches, file)
        os.rename(f"{path}.new", path)

    def wait_hanging(self) -> None:
        ready, _, _ = select.select([self._hanging], [], [], START_S)
        assert ready, "no call hangs"
        os.read(self._hanging, 1)

    def release(self) -> None:
        """Let the calls that hang go on, and those that will."""
        if self._released < 0:
            self._released = os.open(f"{self.state_dir}/release", os.O_RDWR)

    def make_fifos(self) -> None:
        """What a call that hangs opens."""
        for name in ("hanging", "release"):
            os.mkfifo(f"{self.state_dir}/{name}")
        self._hanging = os.open(f"{self.state_dir}/hanging", os.O_RDWR | os.O_NONBLOCK)

    def close_fifos(self) -> None:
        """At the end of the test."""
        for descriptor in (self._hanging, self._released):
            if descriptor >= 0:
                os.close(descriptor)

    def _recorded(self) -> list[tuple[str, bytes]]:
        """The method and the bytes of each call that arrived."""
        file = Path(self.state_dir, "calls.jsonl")
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        calls = map(json.loads, lines)
        return [(call["method"], base64.b64decode(call["request"])) for call in calls]

    def calls(self, *methods: str) -> list[Any]:
        """The requests that it got, of these methods or of all, as messages."""
        return [
            getattr(csi_pb2, f"{method}Request").FromString(data)
            for method, data in self._recorded()
            if not methods or method in methods
        ]

    def names(self) -> list[str]:
        """The names of the node's methods that were called, without those that ask what it is."""
        return [
            method
            for method, _ in self._recorded()
            if method.startswith("Node") and not method.endswith("Capabilities")
        ]

    def raw(self) -> list[tuple[str, bytes]]:
        """Every call of a node's volume, as the bytes that arrived."""
        return [
            call for call in self._recorded() if call[0].startswith("Node") and "Volume" in call[0]
        ]

    def images(self) -> list[str]:
        return [str(path) for path in Path(self.state_dir, "disks").glob("*.img")]

    def attached(self) -> list[str]:
        """The loop devices of its volumes."""
        return [device for device in map(disks.device_of, self.images()) if device]


@contextmanager
def running(kind: str, base: str, code: Path | None = None) -> Iterator[VendorDriver]:
    """A driver that serves on `driver.sock` below `base`; at the end it is dead and its devices are detached.

    `code` is a directory with another package `examples`.
    """
    state_dir = f"{base}/{kind}-state"
    os.makedirs(state_dir, exist_ok=True)
    driver = VendorDriver(kind, f"{base}/driver.sock", state_dir)
    driver.code = code or driver.code
    try:
        driver.make_fifos()
        driver.start()  # one that does not answer is ended too
        yield driver
    finally:
        driver.kill()
        driver.close_fifos()
        disks.detach_below(state_dir)
