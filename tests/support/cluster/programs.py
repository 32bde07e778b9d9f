"""`crust driver` as processes: controllers and nodes of a cluster, what they log and what they answer over HTTP."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

from crust.cluster.etcd.client.certificates import Files
from examples.cluster import freezing
from examples.cluster.etcd import PREFIX, Etcd

READY_S = 90.0
LEASE_S = 60
"""A leader whose store is away for longer ends, and is asked before."""


class Program:
    """A process of `crust`, killed by the kernel if the tests end."""

    def __init__(self, log: Path, *arguments: str, user: str = "") -> None:
        self._log = log
        self._arguments = arguments
        self._user = user
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, *, wait: bool = True) -> None:
        """Start it, and wait until it serves."""
        ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        name = f"crust-test-{uuid.uuid4().hex}"
        ready.bind(f"\0{name}")
        # Not another user: a checkout below a home directory is for its owner alone.
        user = ["--bounding-set=-all", "--inh-caps=-all"] if self._user else []
        with ready, self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                "/usr/bin/setpriv", *user, "--pdeathsig", "KILL", "--",
                sys.executable, "-m", "crust", *self._arguments,
                stdout=log, stderr=log, cwd="/",
                env={"NOTIFY_SOCKET": f"@{name}", "PATH": os.environ["PATH"],
                     "PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip
            if wait:
                data = asyncio.get_running_loop().sock_recv(ready, 4096)
                assert b"READY=1" in await asyncio.wait_for(data, READY_S), self.log

    @property
    def log(self) -> str:
        """The end of what it has logged."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-6000:]

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """No thread of it runs while the block does; its sockets stay open."""
        assert self._process is not None
        freezing.freeze(self._process.pid)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    async def ended(self) -> int:
        """Wait until it ends by itself; returns its exit code."""
        assert self._process is not None
        return await asyncio.wait_for(self._process.wait(), READY_S)

    async def end(self, number: int = signal.SIGKILL) -> int:
        """End it; returns its exit code."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.send_signal(number)
        return await self._process.wait()


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    """Ask until the answer is yes, which no program tells unasked."""
    while not await check():  # noqa: ASYNC110
        await asyncio.sleep(0.05)


class Started:
    """Programs of crust, and what they answer."""

    def __init__(self, base: Path, etcd: Etcd, stack: AsyncExitStack) -> None:
        self.base = base
        self._etcd = etcd
        self._stack = stack

    async def start(self, name: str, *arguments: str, files: Files) -> None:
        """`crust driver`, as a member of the cluster with these certificates."""
        root = self.base / name
        root.mkdir(mode=0o700)
        config = root / "driver.toml"
        config.write_text(
            f'[cluster]\nendpoints = ["{self._etcd.members[0].address}"]\nprefix = "{PREFIX}"\n'
            f"lease_s = {LEASE_S}\nsettle_s = {LEASE_S}\n"
            f'ca = "{files.ca}"\ncert = "{files.cert}"\nkey = "{files.key}"\n'
        )
        program = Program(
            root / "log", "driver", "--config", str(config), "--socket", f"{root}/csi.sock",
            "--run-dir", f"{root}/run", "--metrics-address", "127.0.0.1:0", *arguments,
        )  # fmt: skip
        self._stack.push_async_callback(program.end)
        await program.start()

    async def controller(self, name: str, files: Files | None = None) -> None:
        """A controller."""
        files = files or self._etcd.files("controller")
        await self.start(name, "--mode", "controller", files=files)

    async def node(self, name: str, files: Files | None = None) -> None:
        """A node with a pool of its own."""
        root = self.base / name
        files = files or self._etcd.files(name)
        await self.start(
            name, "--mode", "node", "--node-id", name, "--state-dir", f"{root}/pool",
            "--create-pool", "--no-check-propagation", files=files,
        )  # fmt: skip

    async def answer(self, name: str, path: str = "/readyz") -> tuple[int, str]:
        """What it answers over HTTP."""
        return await asyncio.to_thread(read, f"http://{self.address(name)}{path}")

    def address(self, name: str) -> str:
        """Where it serves HTTP, as "host:port"."""
        log = (self.base / name / "log").read_text()
        found = re.search(r"metrics +address=(\S+)", log)
        assert found is not None, log
        return found[1]

    async def becomes(self, name: str, status: int, word: str) -> None:
        """Wait until /readyz answers so, which no program tells unasked."""
        said = (0, "")
        try:
            async with asyncio.timeout(READY_S):
                while said[0] != status or word not in said[1]:
                    await asyncio.sleep(0.1)
                    said = await self.answer(name)
        except TimeoutError:
            raise AssertionError(f"{said}: {(self.base / name / 'log').read_text()}") from None


def read(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=READY_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
