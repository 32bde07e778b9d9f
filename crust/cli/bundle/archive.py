"""Writes the archive: a compressed tar file with one member per part, written as the parts arrive."""

import asyncio
import io
import os
import tarfile
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import click

from crust import errors
from crust.cli.bundle import parts
from crust.host.process import oserrors, workers

SUFFIXES = (".tar.gz", ".tgz")


class UnknownArchive(errors.InvalidRequest):
    """The name of the archive does not end as that of a compressed tar file."""

    def __init__(self, path: Path) -> None:
        why = f"its name ends with none of {', '.join(SUFFIXES)}"
        super().__init__(f"{path} cannot be written", why=why, hint="name it FILE.tar.gz")


def run(path: Path, places: parts.NodeFiles) -> int:
    """Write the archive; returns the exit code."""
    try:
        count = asyncio.run(write(path, parts.parts(places)))
    except errors.CrustError as error:
        click.echo(error.shown(), err=True)
        return 2 if isinstance(error, errors.InvalidRequest) else 1
    click.echo(f"{path}: {count} files; look at it before you send it: names and paths are in it")
    return 0


async def write(path: Path, members: AsyncIterator[tuple[str, bytes]]) -> int:
    """Write a new archive; returns how many files it has. A file that exists is not touched.

    An unfinished archive is removed. Raises `UnknownArchive`, and one of crust's errors for what the kernel refuses.
    """
    if not path.name.endswith(SUFFIXES):
        raise UnknownArchive(path)
    prefix = path.name.removesuffix(".tgz").removesuffix(".tar.gz") or "crust"
    with oserrors.translating(f"cannot write {path}"), open(path, "xb", opener=_private) as file:  # noqa: ASYNC230 - an open of a new file, by a command that serves nobody
        try:
            return await _write(file, prefix, members)
        except BaseException:
            with suppress(OSError):
                os.unlink(path)
            raise


async def _write(file: BinaryIO, prefix: str, members: AsyncIterator[tuple[str, bytes]]) -> int:
    count = 0
    with tarfile.open(fileobj=file, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
        async for name, data in members:
            member = tarfile.TarInfo(f"{prefix}/{name}")
            member.size, member.mode, member.mtime = len(data), 0o600, int(time.time())
            await workers.run(tar.addfile, member, io.BytesIO(data))
            count += 1
    return count


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
