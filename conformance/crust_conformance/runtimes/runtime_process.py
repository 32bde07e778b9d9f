"""The runtime's command: it registers, reads lines, and answers each with one line.

    start SANDBOX MOUNT_SOURCE   ok: the volume is mounted; refused WHY: it cannot be used; ordinary: not deferred
    stop SANDBOX                 ok: the sandbox has ended, and its claims are released

A command that does not answer in time is killed, because a late answer would be taken for the next one. A command
that has ended is started again before the next case.
"""

import asyncio
import contextlib
import errno
import os
import shlex
import signal
import socket
import stat
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator

from crust.core import errors
from crust.host.process import workers
from crust_conformance.runtimes.testing import FakeProxy, Runtime


class RuntimeNotUsable(errors.NotReady):
    """The command under test does not register, or has ended."""

    def __init__(self, command: str, why: str) -> None:
        super().__init__(
            f"the runtime {command!r} cannot be tested",
            why=why,
            hint="it must register at the socket that its command line names, and answer each line of its input",
        )


class RuntimeProcess:
    """The process of the command. `transcript` has the lines and calls of the running case."""

    def __init__(self, command: str, directory: str, proxy: FakeProxy, timeout_s: float) -> None:
        self.proxy = proxy
        self.directory = directory
        self.transcript: list[str] = []
        self._command = command
        self.timeout_s = timeout_s
        self._process: Process | None = None
        self._runtime: Runtime | None = None

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
            (registered, ended), timeout=self.timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        for waiting in (registered, ended):
            waiting.cancel()
        if not registered.done() or registered.cancelled():
            code = self._process.returncode
            how = "in" if code is None else f"and ended with {code}, within"
            raise RuntimeNotUsable(self._command, f"it did not register {how} {self.timeout_s:g} s")
        self._runtime = registered.result()

    async def _registered(self) -> Runtime:
        async with self.proxy.changed:
            await self.proxy.changed.wait_for(lambda: self.proxy.runtimes)
            return next(iter(self.proxy.runtimes.values()))

    async def revive(self) -> str:
        """Start the command again if it has ended. Raises `RuntimeNotUsable`.

        Returns how it has ended, if it has by itself since the last case; else nothing.

        Dead sockets are removed before. A command that does not remove them itself may have ended for that reason,
        which one case has reported.
        """
        process = self._process
        if process is not None and process.returncode is None:
            return ""
        await self.kill()
        await self._lost()
        for path in await workers.run(_dead_sockets, self.directory):
            os.unlink(path)
        await self.serve()
        return f"the runtime's command has ended with {process.returncode}" if process else ""

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
        _close_pipes(process)
        raise self._outlived()

    @contextlib.asynccontextmanager
    async def command_stopped(self) -> AsyncIterator[None]:
        """SIGSTOP the command; it goes on when the block ends."""
        process = self._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        try:
            events = os.WSTOPPED | os.WEXITED | os.WNOWAIT
            await workers.run(os.waitid, os.P_PID, process.pid, events)
            self.transcript.append("(SIGSTOP to the runtime)")
            yield
        finally:
            process.send_signal(signal.SIGCONT)
            self.transcript.append("(SIGCONT to the runtime)")

    async def _has_ended(self, process: Process) -> bool:
        """Whether it ends in time, with all processes that have its output."""
        ended = asyncio.ensure_future(process.wait())
        await asyncio.wait((ended,), timeout=self.timeout_s)
        return not ended.cancel()

    async def _lost(self) -> None:
        try:
            await self.proxy.lost(self.name, self.timeout_s)
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

    @property
    def session(self) -> int:
        """The session of the runtime's command."""
        assert self._process is not None
        return os.getsid(self._process.pid)

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
            async with asyncio.timeout(self.timeout_s):
                answer = (await process.stdout.readline()).decode(errors="replace").strip()
        except TimeoutError as error:
            await self.kill()  # a late answer would be taken for the next one
            raise AssertionError(
                f"no line on its standard output within {self.timeout_s:g} s: is each answer flushed?"
            ) from error
        except (BrokenPipeError, ConnectionResetError) as error:
            raise AssertionError("the runtime's command reads no lines any more") from error
        self.transcript.append(f"<- {answer or '(the command has ended)'}")
        return answer

    async def end_of_command(self) -> str:
        """After an empty answer: the end of the command, a sentence."""
        process, self._process = self._process, None
        assert process is not None
        if not await self._has_ended(process):
            process.kill()
            _close_pipes(process)
            return "the runtime's command has closed its standard output"
        return f"the runtime's command has ended with {process.returncode}"


def _close_pipes(process: Process) -> None:
    """Close this end of the pipes: another process may have the other one, and asyncio waits for that one's end."""
    process._transport.close()  # type: ignore[attr-defined]


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
