"""A compressed tar file that is written as its parts arrive, without blocking the event loop."""

import asyncio
import os
import tarfile
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol

import aiofiles
import aiofiles.os
from aiofiles.threadpool.binary import AsyncBufferedIOBase

from crust import errors
from crust.host.process import oserrors

SUFFIXES = (".tar.gz", ".tgz", ".tar.zst")


class Compressor(Protocol):
    """What zlib and zstandard have in common."""

    def compress(self, data: bytes, /) -> bytes:
        """The compressed bytes that are ready."""
        ...

    def flush(self) -> bytes:
        """The rest."""
        ...


class UnknownArchive(errors.InvalidRequest):
    """The name of the archive does not say which kind it is, or its compression is not installed."""

    def __init__(self, path: Path, why: str) -> None:
        hint = "name it .tar.gz, or .tar.zst with pip install 'crust-csi[zstd]'"
        super().__init__(f"{path} cannot be written", why=why, hint=hint)


class Archive:
    """An archive that is open."""

    def __init__(self, file: AsyncBufferedIOBase, compressor: Compressor, prefix: str) -> None:
        self._file = file
        self._compressor = compressor
        self._prefix = prefix

    async def add(self, name: str, data: bytes) -> None:
        """A file with this content."""
        member = tarfile.TarInfo(f"{self._prefix}/{name}")
        member.size, member.mode, member.mtime = len(data), 0o600, int(time.time())
        padding = bytes(-len(data) % tarfile.BLOCKSIZE)
        block = member.tobuf(tarfile.PAX_FORMAT) + data + padding
        await self._file.write(await asyncio.to_thread(self._compressor.compress, block))

    async def finish(self) -> None:
        """The end of the archive."""
        end = self._compressor.compress(bytes(2 * tarfile.BLOCKSIZE)) + self._compressor.flush()
        await self._file.write(end)


@asynccontextmanager
async def writing(path: Path) -> AsyncIterator[Archive]:
    """A new archive at the path. An existing file is not touched; an unfinished one is removed.

    Raises `UnknownArchive`, and one of crust's errors for what the kernel refuses.
    """
    compressor = _compressor(path)
    prefix = path.name.split(".tar")[0].removesuffix(".tgz") or "crust"
    with oserrors.translating(f"cannot write {path}"):
        async with aiofiles.open(path, "xb", opener=_private) as file:
            try:
                archive = Archive(file, compressor, prefix)
                yield archive
                await archive.finish()
            except BaseException:
                with suppress(OSError):
                    await aiofiles.os.unlink(path)
                raise


def _compressor(path: Path) -> Compressor:
    if path.name.endswith((".tar.gz", ".tgz")):
        return zlib.compressobj(wbits=31)
    if not path.name.endswith(".tar.zst"):
        raise UnknownArchive(path, f"its name ends with none of {', '.join(SUFFIXES)}")
    try:
        import zstandard
    except ImportError as err:
        raise UnknownArchive(path, "the package zstandard is not installed") from err
    return zstandard.ZstdCompressor().compressobj()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
