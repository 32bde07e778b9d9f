"""`crust bundle FILE`: a support archive of this node, for a bug report.

It collects the parts that exist, and lists the missing ones with the reason. Each part is bounded, and every line of
text passes the filter for credentials before it is written. Files that hold secrets by design (kubeconfigs, volumes)
are not read. The archive is new, only its owner can read it, and it is removed if it cannot be completed.
"""

import importlib.metadata
import io
import os
import platform
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import crust
from crust.cli.doctor import examine
from crust.core import credentials, errors, operations
from crust.host.block import loopctl
from crust.host.files import listing
from crust.host.process import syscalls, workers
from crust.inspection import daemon_calls, output, show

SUFFIXES = (".tar.gz", ".tgz")

LIMIT_BYTES = 8 << 20
"""The limit of one file or program's output; its end is kept."""

LIMIT_FILES = 2000
"""The limit of one kind, e.g. records of volumes."""

READ_S = 10.0
"""How long one file may take."""

_PROGRAM_S = 30.0
_UNITS = ("crust-node", "crust-proxy", "crust-shim", "crust-shim@*", "crust-driver", "crust-kata")
_PACKAGES = ("click", "grpcio", "protobuf", "pydantic", "prometheus-client", "rich")


@dataclass(frozen=True, slots=True)
class NodeFiles:
    """The directories of a node, and its journal's program."""

    run_dir: str
    state_dir: str
    config_dir: str = "/etc/crust"
    journal: str = "journalctl"


async def write(path: Path, members: AsyncIterator[tuple[str, bytes]]) -> int:
    """Write a new archive; returns how many files it has. A file that exists is not touched.

    An unfinished archive is removed. Raises `UnknownArchive`, and the kernel's refusals as errors of crust.
    """
    if not path.name.endswith(SUFFIXES):
        raise errors.InvalidRequest.named(
            "UnknownArchive",
            f"{path} cannot be written",
            why=f"its name ends with none of {', '.join(SUFFIXES)}",
        )
    prefix = path.name.removesuffix(".tgz").removesuffix(".tar.gz") or "crust"
    flags, count = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0
    with (
        syscalls.translating(f"cannot write {path}"),
        os.fdopen(os.open(path, flags, 0o600), "wb") as file,
    ):
        try:
            with tarfile.open(fileobj=file, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
                async for name, data in members:
                    member = tarfile.TarInfo(f"{prefix}/{name}")
                    member.size, member.mode, member.mtime = len(data), 0o600, int(time.time())
                    await workers.run(tar.addfile, member, io.BytesIO(data))
                    count += 1
        except BaseException:
            os.unlink(path)
            raise
    return count


async def parts(places: NodeFiles) -> AsyncIterator[tuple[str, bytes]]:
    """Name and content of each file of the archive. `missing.txt` lists the files that cannot be read."""
    missing: list[str] = []
    units = [f"--unit={unit}" for unit in _UNITS]
    journal = (places.journal, *units, "--lines=5000", "--no-pager", "--output=short-iso")
    questions: dict[str, Callable[[], Awaitable[bytes]]] = {
        "status.json": lambda: _json(show.answer(places.run_dir, show.status)),
        "doctor.json": lambda: _json(examine.examine(places.run_dir)),
        "versions.txt": lambda: workers.run(_versions),
        "loop-devices.txt": lambda: workers.run(_loops),
        "journal.txt": lambda: workers.run(_output, *journal),
    }
    for name, question in questions.items():
        try:
            yield name, await workers.run(_filtered, await question())
        except (errors.CrustError, OSError) as err:
            missing.append(f"{name}: {daemon_calls.reason(err)}")
    async for name, data in _files(places, missing):
        yield name, await workers.run(_filtered, data)
    if missing:
        yield "missing.txt", _filtered("\n".join([*missing, ""]).encode())


async def _files(places: NodeFiles, missing: list[str]) -> AsyncIterator[tuple[str, bytes]]:
    """The files, as they are. On a disk that hangs each file takes a thread; after 16 no file is read any more."""
    calls = operations.KeyedOperations(workers.Workers("crust bundle", limit=16))
    # directory, pattern below it, and the directory in the archive; a pipe that matches is listed as missing
    wanted = [
        (places.config_dir, "*.toml", "settings"),
        (f"{places.run_dir}/volumes", "*/*.json", "handoff"),
        (f"{places.run_dir}/driver", "*/*.json*", "node-state"),
        (f"{places.run_dir}/driver", "pools/*/*/*.json*", "node-state"),
        *_of_pool(places.state_dir, "pool"),
        ("/", "proc/self/mountinfo", "kernel"),
        ("/", "proc/locks", "kernel"),
        ("/", "proc/filesystems", "kernel"),
    ]
    for root, pattern, into in wanted:  # it grows by the pools that the settings name
        glob = f"{root}/{pattern}"
        try:
            paths = await calls.look(
                glob, partial(listing.matching, root, pattern), timeout_s=READ_S
            )
        except (errors.CrustError, OSError) as err:
            missing.append(f"{glob}: {daemon_calls.reason(err)}")
            continue
        if len(paths) > LIMIT_FILES:
            missing.append(f"{into}: {len(paths) - LIMIT_FILES} files more")
        for path in paths[:LIMIT_FILES]:
            try:
                data = await calls.look(path, partial(_end_of, path), timeout_s=READ_S)
            except (errors.CrustError, OSError) as err:
                missing.append(f"{path}: {daemon_calls.reason(err)}")
                continue
            yield f"{into}/{path.relative_to(root)}", data
            if into != "settings":
                continue
            try:
                named = _state_dirs(tomllib.loads(data.decode(errors="replace")))
            except tomllib.TOMLDecodeError as err:
                missing.append(f"the pools that {path} names: {err}")
                continue
            for pool in sorted(named - {root for root, *_ in wanted}):
                wanted += _of_pool(pool, f"pools/{pool.strip('/')}")


def _of_pool(state_dir: str, into: str) -> list[tuple[str, str, str]]:
    """The identity and the records of a pool, as directory, pattern and directory in the archive."""
    patterns = ("pool.json", "volumes/*/*.json", "snapshots/*/*.json")
    return [(state_dir, pattern, into) for pattern in patterns]


def _state_dirs(table: Any) -> set[str]:
    """Each `state_dir` of a table of settings and of the tables in it."""
    if isinstance(table, list):
        return set().union(*map(_state_dirs, table))
    if not isinstance(table, dict):
        return set()
    own = table.get("state_dir")
    return ({own} if isinstance(own, str) else set()) | _state_dirs(list(table.values()))


def _end_of(path: Path) -> bytes:
    """The last lines of a regular file. O_NONBLOCK: opening a pipe must not hang. Blocks."""
    tail, is_cut = b"", False
    # links are followed: the settings of a pod are links, and all directories here are root's alone
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is no regular file")
        while chunk := file.read(1 << 20):
            whole = tail + chunk
            is_cut |= len(whole) > LIMIT_BYTES
            tail = whole[-LIMIT_BYTES:]
    # a part of a line may contain a credential without its name
    return tail.partition(b"\n")[2] if is_cut else tail


def _output(*argv: str) -> bytes:
    """The end of a program's output. Blocks."""
    with tempfile.NamedTemporaryFile() as file:
        try:
            subprocess.run(
                argv, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                timeout=_PROGRAM_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            file.write(f"\n{argv[0]} was stopped after {_PROGRAM_S:.0f} s\n".encode())
            file.flush()
        return _end_of(Path(file.name))


def _filtered(data: bytes) -> bytes:
    """Without credentials. Blocks."""
    return credentials.hidden_lines(data.decode("utf-8", errors="replace")).encode()


async def _json(answer: Awaitable[show.Shown]) -> bytes:
    return output.document((await answer).document).encode()


def _versions() -> bytes:
    lines = [f"crust {crust.__version__}", f"python {sys.version.split()[0]}", platform.platform()]
    for name in _PACKAGES:
        lines.append(f"{name} {importlib.metadata.version(name)}")
    return "\n".join([*lines, ""]).encode()


def _loops() -> bytes:
    return "".join(f"loop{number} {file}\n" for number, file in loopctl.attached()).encode()
