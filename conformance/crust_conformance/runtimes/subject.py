"""The runtime under test, with the sandboxes and volumes of a case.

Volumes are on loop devices in memory, which end with this process. After a case, its volumes and sandboxes are
removed; processes that the runtime leaves running are found by their open claim.lock. The clean-up is a part of its
case: what the runtime answers to it, and an end of the command, is that case's finding.
"""

import asyncio
import contextlib
import datetime
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from crust.core import errors, volumes
from crust.handoff import claims
from crust.host import answers
from crust.host.mounts import mount_api
from crust.host.process import arguments, commands, open_files, processes
from crust_conformance.runtimes import scratch_device
from crust_conformance.runtimes.runtime_process import RuntimeNotUsable, RuntimeProcess
from crust_conformance.runtimes.testing import FakeProxy

MIB = 1 << 20
SIZE = 64 * MIB
GONE_S = 10.0
KEEPER = "keeper"
"""A need that only a running sandbox shows: `RuntimeUnderTest.keepers` skips the case."""
FANOTIFY = "fanotify"
"""A need that the host's kernel has, or not: `file_opens`."""
_NO_SANDBOX = "box-none"
"""The last stop of a clean-up has the runtime finish the ones before."""


class RuntimeUnderTest(RuntimeProcess):
    """The runtime, its sandboxes and volumes."""

    def __init__(self, command: str, directory: str, proxy: FakeProxy, timeout_s: float) -> None:
        super().__init__(command, directory, proxy, timeout_s)
        self._sandboxes: set[str] = set()
        self._targets: dict[str, bool] = {}
        self._devices = contextlib.ExitStack()
        self._scratch: dict[str, scratch_device.ScratchDevice] = {}

    async def close(self) -> None:
        """End the command, and remove what the last case has left, also what the command itself held."""
        if self._sandboxes or self._targets:
            await self.reset()
        with contextlib.suppress(RuntimeNotUsable):  # a case, or the end of the run, reports it
            await self.kill()
        await self._unpublish()

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
        scratch = self._devices.enter_context(scratch_device.blank(size))
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
        with claims.ClaimLock.acquire(
            self.proxy.paths(target), volumes.TargetPath.parse(target)
        ) as lock:
            content = self._write_claim(lock, pid)
        self.transcript.append(f"(a dead claim: {content.decode().strip()})")
        return content

    @contextlib.contextmanager
    def held_by_another(self, target: str, *, is_named: bool = True) -> Iterator[bytes]:
        """Hold the lock as another sandbox, whose claim.json this returns, or without a name as an unpublish does."""
        paths = self.proxy.paths(target)
        with claims.ClaimLock.acquire(paths, volumes.TargetPath.parse(target)) as lock:
            content = self._write_claim(lock, 0) if is_named else b""
            self.transcript.append(f"(claim.lock is held: {content.decode().strip() or 'no name'})")
            try:
                yield content
            finally:
                if is_named:
                    claims.remove(paths)
        self.transcript.append("(claim.lock is free)")

    def _write_claim(self, lock: claims.ClaimLock, pid: int) -> bytes:
        """Write the claim of sandbox box-0 in place of the earlier one; returns the bytes of claim.json."""
        process = answers.seen(processes.of(pid)) if pid else None
        now, state = datetime.datetime.now(datetime.UTC), claims.State.MOUNTED
        claim = claims.Claim("box-0", self.name, state, "", pid, now, live=False, process=process)
        claims.write(lock.paths, claim)
        lock.settle()
        return Path(lock.paths.claim).read_bytes()

    @contextlib.asynccontextmanager
    async def claim_lost(self, target: str) -> AsyncIterator[None]:
        """While the block runs there is no claim.json, and nobody holds the lock but a claimant for a moment."""
        paths, where = self.proxy.paths(target), volumes.TargetPath.parse(target)
        with claims.ClaimLock.acquire(paths, where) as lock:
            content = Path(paths.dead_claim).read_bytes()
            lock.settle()
        self.transcript.append("(claim.json is lost)")

        def put_back() -> bool:
            with contextlib.suppress(claims.HeldBySandbox), claims.ClaimLock.acquire(paths, where):
                Path(paths.claim).touch(0o600)
                Path(paths.claim).write_bytes(content)
                return True
            return False

        try:
            yield
        finally:
            is_back = await self._until(put_back)
            assert is_back, f"claim.lock is held without a claim.json; {self.holders_text(target)}"
            self.transcript.append("(claim.json is there again)")

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
        machine = [pid] if pid else self.other_holders(target)
        self.transcript.append(f"(SIGKILL to the virtual machine: {machine})")
        await self.kill_processes(machine)
        await self._until(lambda: not self.is_held(target))

    async def kill_processes(self, pids: list[int]) -> None:
        """SIGKILL them, and wait until they have ended."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self._until(lambda: not any(map(_is_running, pids)))

    async def ended(self, pids: list[int], *, within_s: float = GONE_S) -> bool:
        """Whether a process of them ends in that time."""
        return await self._until(lambda: not all(map(_is_running, pids)), within_s)

    async def keepers(self, target: str) -> list[int]:
        """The processes that hold the claim for the hypervisor; skips the case if the hypervisor holds it itself.

        This waits for two processes: a single one is no keeper (H-45).
        """
        machine = self.claimed_pid(target)
        if not machine or machine in self.holders(target):
            pytest.skip(KEEPER)
        if not await self._until(lambda: len(self.other_holders(target)) > 1):
            raise AssertionError("one process alone holds the claim, and its end would free it")
        return self.other_holders(target)

    async def claimed_again_or_ended(
        self, target: str, machine: int, *, within_s: float = GONE_S
    ) -> bool:
        """Whether the claim is taken again, and named, or the hypervisor ends, in time."""
        return await self._until(
            lambda: self._is_named(target) or not _is_running(machine), within_s
        )

    def _is_named(self, target: str) -> bool:
        """Whether a live claim names a sandbox: a claimant takes the lock first, and then writes its name."""
        claim = self.proxy.claim(target)
        return claim is not None and claim.live and claim.sandbox_id != ""

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

    def other_holders(self, target: str) -> list[int]:
        """The processes but the runtime's command that have claim.lock open."""
        own_pid = self._process.pid if self._process is not None else 0
        return [pid for pid in self.holders(target) if pid != own_pid]

    async def _until(self, is_so: Callable[[], bool], timeout_s: float = GONE_S) -> bool:
        until = time.monotonic() + timeout_s
        while not (it_is := is_so()) and time.monotonic() < until:
            await asyncio.sleep(0.05)
        return it_is

    async def reset(self) -> list[str]:
        """Remove the sandboxes and volumes of the case; returns what was wrong, a sentence each."""
        wrong = []
        for sandbox in (*sorted(self._sandboxes), _NO_SANDBOX):
            if self._process is None:  # the case has killed it
                break
            try:
                is_running = self._process.returncode is None
                answer = await self.send("stop", sandbox) if is_running else ""
            except (AssertionError, RuntimeNotUsable) as error:
                wrong.append(str(error))
                break
            if not answer:
                wrong.append(await self.end_of_command())
                break
            if answer != "ok":
                wrong.append(f"stop {sandbox} was answered {answer!r}, must be ok")
        self._sandboxes.clear()
        return wrong + await self._unpublish()

    @property
    def left(self) -> list[str]:
        """The targets that could not be unpublished."""
        return list(self._targets)

    async def _unpublish(self) -> list[str]:
        """Returns why a target is left, a sentence each."""
        wrong = []
        for target, guard in list(self._targets.items()):
            try:
                await self.kill_machine(target)
                await self.kill_processes(self.other_holders(target))
                self.proxy.unpublish(target, guard=guard)
            except claims.HeldBySandbox:
                wrong.append(f"the volume is still claimed; {self.holders_text(target)}")
            except errors.CrustError as error:
                wrong.append(f"the volume cannot be unpublished: {error.shown()}")
            else:
                del self._targets[target]
        self._devices.close()
        self._scratch.clear()
        return wrong


def _is_running(pid: int) -> bool:
    return _began(pid) is not None


def _began(pid: int) -> int | None:
    """A process's start, in clock ticks after the boot; None if it has ended. Raises `NotSeen`."""
    process = answers.seen(processes.of(pid)) if pid > 0 else None
    return None if process is None else process.started
