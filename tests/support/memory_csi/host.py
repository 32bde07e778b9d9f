"""The fake driver for a caller that blocks, the conformance suite, and what a host would show: its own table."""

import asyncio
import errno
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

from crust_conformance.orchestrator.host_view import HostView
from tests.support.drivers import fake_driver
from tests.support.drivers.fake_driver import FakeDriver
from tests.support.memory_csi.state import Published


@contextmanager
def serving(driver: FakeDriver, socket: Path) -> Iterator[None]:
    """The driver on its socket, from a thread, while the block runs."""
    loop, stack = asyncio.new_event_loop(), AsyncExitStack()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def wait(work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result()

    try:
        wait(stack.enter_async_context(fake_driver.serving(driver, str(socket))))
        yield
    finally:
        wait(stack.aclose())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class MemoryHost(HostView):
    """The targets of one driver."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver
        self._targets = driver.published
        self._lock = driver.lock

    def _at(self, path: Path) -> Published:
        if str(path) not in self._targets:
            raise FileNotFoundError(str(path))
        return self._targets[str(path)]

    def mounts_at(self, path: Path) -> int:
        return self._targets[str(path)].mounts if str(path) in self._targets else 0

    def mounts_below(self, path: Path) -> list[Path]:
        mounted = [Path(target) for target, at in self._targets.items() if at.mounts]
        return [target for target in mounted if target.is_relative_to(path)]

    def unmount(self, path: Path) -> None:
        self._targets.pop(str(path), None)
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)

    def is_block(self, path: Path) -> bool:
        return self._at(path).is_block

    def size_bytes(self, path: Path) -> int:
        at = self._at(path)
        return len(at.volume.content.raw) if path.is_file() else at.volume.content.fs_bytes

    def group_of(self, path: Path) -> int:
        return self._at(path).group

    def write(self, path: Path, data: bytes, *, offset: int = 0) -> None:
        with self._lock:
            at, name = self._split(path)
            if self._driver.frozen:
                raise OSError("the filesystem is frozen")
            if at.readonly:
                raise OSError(errno.EROFS, "read-only")
            if name:
                at.volume.content.files[name] = data
                return
            end = offset + len(data)
            if end > len(at.volume.content.raw):
                raise OSError("no space")
            at.volume.content.raw[offset:end] = data

    def read(self, path: Path, size_bytes: int, *, offset: int = 0) -> bytes:
        with self._lock:
            at, name = self._split(path)
            if not name:
                return bytes(at.volume.content.raw[offset : offset + size_bytes])
            if name not in at.volume.content.files:
                raise FileNotFoundError(name)
            return at.volume.content.files[name][offset : offset + size_bytes]

    def _split(self, path: Path) -> tuple[Published, str]:
        if str(path) in self._targets:
            return self._targets[str(path)], ""
        return self._at(path.parent), path.name
