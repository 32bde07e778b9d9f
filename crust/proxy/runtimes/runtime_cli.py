"""`runtime-cli` (H-35, KEP-2857): statistics and growth of a filesystem by a program that the runtime names.

A runtime without a daemon that answers calls leaves the path of a program in the entry of each volume that a sandbox
has. The proxy runs it where the entry's handler is not registered, or does not offer the feature. A publish needs a
registered handler all the same: nothing else says what a runtime can mount.

The program runs with the proxy's rights. So the file, the program, and each directory above it must belong to root
(or the proxy's user), and nobody else may be able to replace one of them; a link is refused. It is started without a
shell, with PATH and LC_ALL as its only environment, once at a time for each volume. At the deadline its process
group is killed. Its numbers come from a guest in the end, and are checked as a handler's are.
"""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message

from crust import errors, volumes
from crust.handoff.layout import Layout
from crust.host.files import durable
from crust.host.process import commands, oserrors, workers
from crust.rpc.messages import crust_v1
from crust.wire.v1 import runtime_pb2

STATS_TIMEOUT_S = 7.0
"""With the two seconds in which a program may end by itself: below the caller's ten."""

RESIZE_TIMEOUT_S = 90.0
_OUTPUT_MAX_BYTES = 64 * 1024
_PATH_MAX_BYTES = 4096

Answer = TypeVar("Answer", bound=Message)


class UntrustedRuntimeCli(errors.Refused):
    """What a `runtime-cli` names is not executed: others could have put it there."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"the program of {path} is not executed",
            why=why,
            hint="name a program by its own path, which only root can write, in directories that only root can write",
        )


class RuntimeCliFailed(errors.RuntimeFailed):
    """The program of a `runtime-cli` failed, or wrote something else than its answer."""

    def __init__(self, program: str, why: str) -> None:
        super().__init__(
            f"{program} gave no answer",
            why=why,
            hint="run it by hand: `<program> crust stats <target>`; its runtime has to repair it",
        )


class RuntimeCliBusy(errors.OperationPending):
    """The program runs already for this volume."""

    def __init__(self, target: volumes.TargetPath) -> None:
        super().__init__(
            f"the runtime's program is not called for {target} now",
            why="it runs for this volume already",
            hint="retry when it has ended",
        )


class RuntimeCli:
    """Runs the programs. Both calls return None if the entry has no `runtime-cli`.

    They raise `UntrustedRuntimeCli`, `durable.UntrustedFile`, `RuntimeCliFailed`, `RuntimeCliBusy`.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._running: set[volumes.TargetPath] = set()

    async def stats(
        self, target: volumes.TargetPath, left_s: float | None
    ) -> volumes.VolumeStats | None:
        """The statistics of a volume that a sandbox has."""
        timeout_s = STATS_TIMEOUT_S if left_s is None else min(STATS_TIMEOUT_S, left_s)
        empty = runtime_pb2.RuntimeGetVolumeStatsResponse()
        answer = await self._ask(target, ("stats", target.text), empty, timeout_s)
        if answer is None:
            return None
        condition = answer.volume_condition if answer.HasField("volume_condition") else None
        return crust_v1.stats(answer.usage, condition)

    async def resize(
        self, target: volumes.TargetPath, capacity: volumes.CapacityRange
    ) -> int | None:
        """Grow the filesystem; returns the bytes that it fills."""
        sizes = (str(capacity.required_bytes), str(capacity.limit_bytes))
        empty = runtime_pb2.RuntimeExpandVolumeResponse()
        arguments = ("resize", target.text, *sizes)
        answer = await self._ask(target, arguments, empty, RESIZE_TIMEOUT_S)
        return None if answer is None else answer.capacity_bytes

    async def _ask(
        self,
        target: volumes.TargetPath,
        arguments: tuple[str, ...],
        answer: Answer,
        timeout_s: float,
    ) -> Answer | None:
        program = await workers.run(program_of, self._layout.runtime_cli_path(target))
        if program is None:
            return None
        argv = (program, "crust", *arguments)
        with self._alone(target):
            try:
                ended = await commands.run(
                    argv, timeout_s=timeout_s, output_limit_bytes=_OUTPUT_MAX_BYTES
                )
            except errors.RuntimeFailed as error:
                raise RuntimeCliFailed(program, error.why or str(error)) from error
        try:
            found = json.loads(ended.stdout)
            if not isinstance(found, dict):  # json_format treats an empty list as an empty message
                raise ValueError("no object")
            return json_format.ParseDict(found, answer, ignore_unknown_fields=True)
        except (json_format.ParseError, ValueError, RecursionError) as error:
            kind = answer.DESCRIPTOR.name
            raise RuntimeCliFailed(program, f"its output is no {kind} in JSON") from error

    @contextmanager
    def _alone(self, target: volumes.TargetPath) -> Iterator[None]:
        if target in self._running:
            raise RuntimeCliBusy(target)
        self._running.add(target)
        try:
            yield
        finally:
            self._running.remove(target)


def program_of(path: str) -> str | None:
    """The program that a `runtime-cli` names; None if there is no such file. Blocks."""
    try:
        data = durable.read(path, limit_bytes=_PATH_MAX_BYTES)
    except errors.NotFound:
        return None
    try:
        program = data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError:
        raise UntrustedRuntimeCli(path, "its content is not UTF-8") from None
    if not program.startswith("/") or "\0" in program or os.path.normpath(program) != program:
        raise UntrustedRuntimeCli(path, "its content is not one absolute path")
    _check_program(path, program)
    return program


def _check_program(path: str, program: str) -> None:
    names = program.split("/")[1:]
    steps = ["/", *("/" + "/".join(names[: end + 1]) for end in range(len(names)))]
    for step in steps:
        with oserrors.translating(f"cannot look at {step}"):
            status = os.lstat(step)
        if status.st_uid not in (0, os.geteuid()):
            raise UntrustedRuntimeCli(path, f"{step} belongs to user {status.st_uid}")
        if step == program:
            _check_executable(path, program, status)
        elif not stat.S_ISDIR(status.st_mode):
            raise UntrustedRuntimeCli(path, f"{step} is not a directory")
        elif _is_open(status) and not status.st_mode & stat.S_ISVTX:
            # in a directory with the sticky bit others cannot replace what is ours
            raise UntrustedRuntimeCli(path, f"others may write to {step}")


def _check_executable(path: str, program: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UntrustedRuntimeCli(path, f"{program} is not a regular file")
    if _is_open(status):
        raise UntrustedRuntimeCli(path, f"others may write to {program}")
    if not status.st_mode & stat.S_IXUSR:
        raise UntrustedRuntimeCli(path, f"{program} is not executable")


def _is_open(status: os.stat_result) -> bool:
    return bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
