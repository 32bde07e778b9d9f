"""The runtime under test. Its command reads lines and answers each with one line:

    start SANDBOX MOUNT_SOURCE   ok: the volume is mounted; refused WHY: it cannot be used; ordinary: not deferred
    stop SANDBOX                 ok: the sandbox has ended, and its claims are released

Volumes are on loop devices in memory, which end with this process. After a case, its volumes and sandboxes are
removed; processes that the runtime leaves running are found by their open claim.lock.
"""

import asyncio
import contextlib
import datetime
import errno
import os
import shlex
import signal
import socket
import stat
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crust.core import errors, volumes
from crust.handoff import claims
from crust.host import answers
from crust.host.block import loop
from crust.host.mounts import mount_api
from crust.host.process import arguments, commands, open_files, processes, workers
from crust_conformance.runtimes.testing import FakeProxy, Runtime

MIB = 1 << 20
SIZE = 64 * MIB
GONE_S = 10.0
KEEPER = "keeper"
"""A need that only a running sandbox shows: `RuntimeUnderTest.keepers` skips the case."""


class RuntimeNotUsable(errors.NotReady):
    """The command under test does not register, or has ended."""

    def __init__(self, command: str, why: str) -> None:
        super().__init__(
            f"the runtime {command!r} cannot be tested",
            why=why,
            hint="it must register at the socket that its command line names, and answer each line of its input",
        )


class RuntimeUnderTest:
    """The runtime and its volumes. `transcript` has the lines and calls of the running case."""

    def __init__(self, command: str, directory: str, proxy: FakeProxy, timeout_s: float) -> None:
        self.proxy = proxy
        self.directory = directory
        self.transcript: list[str] = []
        self._command = command
        self._timeout_s = timeout_s
        self._process: Process | None = None
        self._runtime: Runtime | None = None
        self._sandboxes: set[str] = set()
        self._targets: dict[str, bool] = {}
        self._devices = contextlib.ExitStack()
        self._scratch: dict[str, loop.Scratch] = {}

    @property
    def runtime(self) -> Runtime:
        """The registered runtime."""
        assert self._runtime is not None
        return self._runtime

    @property
    def name(self) -> str:
        """The name under which it is registered."""
        return self.runtime.request.name

    async def serve(self) -> None:
        """Start the command and wait until it is registered. Raises `RuntimeNotUsable`."""
        places = {"{registry}": self.proxy.socket, "{directory}": self.directory}
        argv = shlex.split(self._command)
        for place, value in places.items():
            argv = [word.replace(place, value) for word in argv]
        try:
            self._process = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE)
        except OSError as error:
            raise RuntimeNotUsable(self._command, str(error)) from error
        registered = asyncio.ensure_future(self._registered())
        ended = asyncio.ensure_future(self._process.wait())
        await asyncio.wait(
            (registered, ended), timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        for waiting in (registered, ended):
            waiting.cancel()
        if not registered.done() or registered.cancelled():
            code = self._process.returncode
            how = "in" if code is None else f"and ended with {code}, within"
            raise RuntimeNotUsable(
                self._command, f"it did not register {how} {self._timeout_s:g} s"
            )
        self._runtime = registered.result()

    async def _registered(self) -> Runtime:
        async with self.proxy.changed:
            await self.proxy.changed.wait_for(lambda: self.proxy.runtimes)
            return next(iter(self.proxy.runtimes.values()))

    async def revive(self) -> None:
        """Start the command again if an earlier case has ended it. Raises `RuntimeNotUsable`.

        Dead sockets are removed before. A command that does not remove them itself may have ended for that reason,
        which one case has reported.
        """
        if self._process is not None and self._process.returncode is None:
            return
        await self.kill()
        await self._lost()
        for path in await workers.run(_dead_sockets, self.directory):
            os.unlink(path)
        await self.serve()

    async def kill(self) -> None:
        """SIGKILL the command; its sandboxes live on. Raises `RuntimeNotUsable` if the runtime also lives on."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        if await self._has_ended(process):
            return
        assert process.stdin is not None
        process.stdin.close()  # a runtime that lives on reads from it
        await self._has_ended(process)
        raise self._outlived()

    async def _has_ended(self, process: Process) -> bool:
        """Whether it ends in time, with all processes that have its output."""
        ended = asyncio.ensure_future(process.wait())
        await asyncio.wait((ended,), timeout=self._timeout_s)
        return not ended.cancel()

    async def _lost(self) -> None:
        try:
            await self.proxy.lost(self.name, self._timeout_s)
        except TimeoutError:
            raise self._outlived() from None

    def _outlived(self) -> RuntimeNotUsable:
        return RuntimeNotUsable(
            self._command,
            "it was killed, and the runtime lives on: it must be the runtime's own process, without a shell",
        )

    async def restart(self) -> None:
        """Start the command again, under the same name. Raises `RuntimeNotUsable`."""
        await self.kill()
        await self._lost()
        await self.serve()

    async def close(self) -> None:
        """End the command, and remove the volumes and sandboxes of the last case."""
        await self.reset()
        with contextlib.suppress(RuntimeNotUsable):  # a case, or the end of the run, reports it
            await self.kill()

    async def send(self, *words: str) -> str:
        """Write a line; return the answer."""
        line = " ".join(words)
        self.transcript.append(f"-> {line}")
        process = self._process
        if process is None or process.returncode is not None:
            raise AssertionError("the runtime's command has ended")
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(f"{line}\n".encode())
            await process.stdin.drain()
            async with asyncio.timeout(self._timeout_s):
                answer = (await process.stdout.readline()).decode(errors="replace").strip()
        except (TimeoutError, BrokenPipeError, ConnectionResetError) as error:
            how = f"within {self._timeout_s:g} s" if isinstance(error, TimeoutError) else "any more"
            raise AssertionError(
                f"no line on its standard output {how}: is each answer flushed?"
            ) from error
        self.transcript.append(f"<- {answer or '(the command has ended)'}")
        return answer

    async def start(self, sandbox: str, source: str) -> str:
        """Start a sandbox with the mount source; returns the first word of the answer."""
        self._sandboxes.add(sandbox)
        return (await self.send("start", sandbox, source)).partition(" ")[0]

    async def started(self, sandbox: str, source: str) -> None:
        """Start a sandbox that must start."""
        assert await self.start(sandbox, source) == "ok", "the sandbox was not started"

    async def refused(self, sandbox: str, source: str) -> None:
        """Start a sandbox that must be refused."""
        answer = await self.start(sandbox, source)
        if answer == "ok":
            raise AssertionError(f"sandbox {sandbox} was started, and must be refused")
        assert answer == "refused", f"the answer must be: refused, and why; it is {answer!r}"

    async def stop(self, sandbox: str) -> None:
        """End the sandbox."""
        self._sandboxes.discard(sandbox)
        assert await self.send("stop", sandbox) == "ok", "the sandbox was not stopped"

    def device(self, size: int = SIZE) -> str:
        """A blank device, which is removed after the case."""
        scratch = self._devices.enter_context(loop.scratch(size))
        self._scratch[scratch.path] = scratch
        return scratch.path

    def grow(self, device: str, size: int) -> None:
        """Make a device larger."""
        self._scratch[device].grow(size)
        self.transcript.append(f"({device} has {size} bytes now)")

    async def formatted(self, filesystem_bytes: int = SIZE) -> str:
        """A device with an ext4 of that size."""
        device = self.device()
        argv = ["mkfs.ext4", "-q", "-b", "4096", device, str(filesystem_bytes // 4096)]
        await commands.run_command(argv, timeout_s=60)
        return device

    async def volume(self, name: str = "one", **mount: Any) -> str:
        """Publish an ext4 volume to the runtime; returns its target path."""
        return self.publish(await self.formatted(), name, **mount)

    async def running(self) -> str:
        """Sandbox box-1 has a new ext4 volume; returns its target path."""
        target = await self.volume()
        await self.started("box-1", target)
        return target

    def publish(self, device: str, name: str = "one", *, guard: bool = False, **fields: Any) -> str:
        """Publish the device; `fields` are the arguments of `FakeProxy.publish`."""
        target = f"{self.directory}/targets/{name}"
        os.makedirs(target, exist_ok=True)
        self._targets[target] = guard
        self.proxy.publish(device, target, guard=guard, **{"handler": self.name, **fields})
        text = ", ".join(f"{key}={value}" for key, value in fields.items())
        self.transcript.append(f"(published at {target}{': ' if text else ''}{text})")
        return target

    def leave_claim(self, target: str, pid: int = 0) -> bytes:
        """Leave a dead claim of another sandbox, as one whose keepers were killed; returns the bytes of claim.json.

        `pid` is its hypervisor's process; 0: it names none.
        """
        paths, name = self.proxy.paths(target), self.name
        process = answers.seen(processes.of(pid)) if pid else None
        now = datetime.datetime.now(datetime.UTC)
        state = claims.State.MOUNTED
        with claims.ClaimLock.acquire(paths, volumes.TargetPath.parse(target)):
            claim = claims.Claim("box-0", name, state, "", pid, now, live=False, process=process)
            claims.write(paths, claim)
        content = Path(paths.claim).read_bytes()
        self.transcript.append(f"(a dead claim: {content.decode().strip()})")
        return content

    def remove_guard(self, target: str) -> None:
        """Remove the guard mount of a target whose entry is gone."""
        mount_api.unmount(target)
        self._targets.pop(target)

    def holders_text(self, target: str) -> str:
        """A sentence about the processes that have claim.lock open, for the runtime's author."""
        holders = [f"{pid} ({arguments.command_of(pid)})" for pid in self.holders(target)]
        return f"{', '.join(holders) or 'no process'} has claim.lock open"

    def is_held(self, target: str) -> bool:
        """Whether a process holds the claim's lock."""
        claim = self.proxy.claim(target)
        return claim is not None and claim.live

    def holders(self, target: str) -> list[int]:
        """The processes that have the entry's claim.lock open."""
        pids = open_files.holders(self.proxy.paths(target).claim_lock)
        return [pid for pid in pids if pid != os.getpid()]

    async def kill_machine(self, target: str) -> None:
        """SIGKILL the sandbox's hypervisor, and wait until the lock is free.

        The hypervisor is the process that claim.json names, unless that is the runtime's command: then the processes
        that have claim.lock open.
        """
        pid = self.claimed_pid(target)
        machine = [pid] if pid else self._other_holders(target)
        self.transcript.append(f"(SIGKILL to the virtual machine: {machine})")
        await self.kill_processes(machine)
        await self._until(lambda: not self.is_held(target))

    async def kill_processes(self, pids: list[int]) -> None:
        """SIGKILL them, and wait until they have ended."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self._until(lambda: not any(map(_is_running, pids)))

    async def ended(self, pids: list[int], *, within_s: float) -> bool:
        """Whether a process of them ends in that time."""
        return await self._until(lambda: not all(map(_is_running, pids)), within_s)

    async def keepers(self, target: str) -> list[int]:
        """The processes that hold the claim for the hypervisor; skips the case if the hypervisor holds it itself.

        This waits for two processes: a single one is no keeper (H-45).
        """
        machine = self.claimed_pid(target)
        if not machine or machine in self.holders(target):
            pytest.skip(KEEPER)
        if not await self._until(lambda: len(self._other_holders(target)) > 1):
            raise AssertionError("one process alone holds the claim, and its end would free it")
        return self._other_holders(target)

    async def claimed_again_or_ended(self, target: str, machine: int) -> bool:
        """Whether the claim is taken again, and named, or the hypervisor ends, in time."""
        return await self._until(lambda: self._is_named(target) or not _is_running(machine))

    def _is_named(self, target: str) -> bool:
        """Whether a live claim names a sandbox: a claimant takes the lock first, and then writes its name."""
        claim = self.proxy.claim(target)
        return claim is not None and claim.live and claim.sandbox_id != ""

    @property
    def session(self) -> int:
        """The session of the runtime's command."""
        assert self._process is not None
        return os.getsid(self._process.pid)

    def may_answer(self, pid: int) -> bool:
        """Whether the process runs, and the runtime can have started it: no other process may be killed."""
        began = _began(pid)
        return began is not None and began >= (_began(os.getpid()) or 0)

    def claimed_pid(self, target: str) -> int:
        """The process that claim.json names; 0 if it is the runtime's command, or has ended."""
        claim = self.proxy.claim(target)
        own_pid = self._process.pid if self._process is not None else 0
        if claim is None or claim.pid == own_pid or not self.may_answer(claim.pid):
            return 0
        return claim.pid

    def _other_holders(self, target: str) -> list[int]:
        own_pid = self._process.pid if self._process is not None else 0
        return [pid for pid in self.holders(target) if pid != own_pid]

    async def _until(self, is_so: Callable[[], bool], timeout_s: float = GONE_S) -> bool:
        until = time.monotonic() + timeout_s
        while not (it_is := is_so()) and time.monotonic() < until:
            await asyncio.sleep(0.05)
        return it_is

    async def reset(self) -> None:
        """Remove the sandboxes and volumes of the case."""
        for sandbox in sorted(self._sandboxes):
            with contextlib.suppress(AssertionError):
                await self.send("stop", sandbox)
        self._sandboxes.clear()
        for target, guard in self._targets.items():
            await self.kill_machine(target)
            await self.kill_processes(self._other_holders(target))
            with contextlib.suppress(claims.HeldBySandbox):
                self.proxy.unpublish(target, guard=guard)
        self._targets.clear()
        self._devices.close()
        self._scratch.clear()
        self.transcript.clear()


def _dead_sockets(directory: str) -> list[str]:
    """The sockets below the directory that no process serves. Raises `OSError`."""
    paths = []
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                if entry.is_dir(follow_symlinks=False):
                    paths += _dead_sockets(entry.path)
                elif _is_dead_socket(entry.path):
                    paths.append(entry.path)
    return paths


def _is_dead_socket(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
        return is_socket and client.connect_ex(path) == errno.ECONNREFUSED


def _is_running(pid: int) -> bool:
    return _began(pid) is not None


def _began(pid: int) -> int | None:
    """A process's start, in clock ticks after the boot; None if it has ended. Raises `NotSeen`."""
    process = answers.seen(processes.of(pid)) if pid > 0 else None
    return None if process is None else process.started
