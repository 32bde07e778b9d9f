"""Drivers that are added by a file each, `<drivers_dir>/<any name>.toml`, without a restart of the proxy.

A file has what a `[[drivers]]` table of proxy.toml has: name, socket, backend. The directory is watched, and read
every few seconds: a new file adds its driver, a removed one removes it when its operations have ended, a changed one
does both. A file that cannot be used is reported, as the proxy's health, and ignored; the others are served.
"""

import asyncio
import logging
import os
import tomllib
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

import pydantic

from crust import errors
from crust.handoff import watch
from crust.host.process import oserrors
from crust.proxy.drivers.driver_sockets import DriverSockets
from crust.rpc.serving.health import Health
from crust.settings.loading import reasons
from crust.settings.proxy import ServedDriver

_log = logging.getLogger(__name__)


class InvalidDriverFile(errors.InvalidRequest):
    """A file in drivers_dir cannot be used; it is ignored."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(
            f"the driver of {path} is not served",
            why=why,
            hint="correct the file: name, socket and backend, each of its own",
        )


class DriverFiles:
    """Keeps what is served as the directory says. `static` are the drivers of the settings, which come first."""

    def __init__(
        self,
        directory: str,
        static: Iterable[ServedDriver],
        sockets: DriverSockets,
        health: Health,
    ) -> None:
        self.directory = directory
        self._static = tuple(static)
        self._sockets = sockets
        self._health = health
        self._served: dict[str, ServedDriver] = {}
        self._reported: set[str] = set()

    async def look(self) -> None:
        """Read all files, and serve what they say. One that fails is tried again at the next look."""
        found, problems = await asyncio.to_thread(self._read)
        for path, driver in list(self._served.items()):
            if found.get(path) != driver:
                await self._sockets.remove(driver.name)
                del self._served[path]
        for path, driver in found.items():
            if path not in self._served:
                try:
                    await self._sockets.add(driver)
                    self._served[path] = driver
                except errors.CrustError as error:
                    problems[path] = error
        for path in self._reported | problems.keys():
            self._health.report(path, problems.get(path), is_fatal=False)
        self._reported = set(problems)

    def _read(self) -> tuple[dict[str, ServedDriver], dict[str, errors.CrustError]]:
        found: dict[str, ServedDriver] = {}
        problems: dict[str, errors.CrustError] = {}
        try:
            with oserrors.translating(f"cannot list {self.directory}"):
                names = sorted(os.listdir(self.directory))
        except errors.NotFound:
            names = []  # it may be made later
        for name in names:
            if not name.endswith(".toml") or name.startswith("."):
                continue
            path = f"{self.directory}/{name}"
            try:
                found[path] = self._parse(path, found)
            except errors.CrustError as error:
                problems[path] = error
        return found, problems

    def _parse(self, path: str, others: Mapping[str, ServedDriver]) -> ServedDriver:
        with oserrors.translating(f"cannot read {path}"), open(path, "rb") as file:
            data = file.read(65536)
        try:
            driver = ServedDriver.model_validate(tomllib.loads(data.decode()))
        except pydantic.ValidationError as err:
            raise InvalidDriverFile(path, reasons(err)) from err
        except ValueError as err:
            raise InvalidDriverFile(path, f"it is not TOML: {err}") from err
        for other in (*self._static, *others.values()):
            for kind in ("name", "socket", "backend"):
                if getattr(other, kind) == getattr(driver, kind):
                    raise InvalidDriverFile(path, f"another driver has the same {kind}")
        return driver


@asynccontextmanager
async def watching(files: DriverFiles) -> AsyncIterator[None]:
    """Follow the directory while the block runs, from one look at its beginning."""
    await files.look()
    looking = asyncio.Lock()
    async with watch.Watch(files.directory) as hints:
        task = asyncio.create_task(_follow(files, hints, looking), name="watch drivers")
        task.add_done_callback(_ended)
        try:
            yield
        finally:
            async with looking:  # a driver that is being removed has running operations
                task.cancel()
            await asyncio.wait([task])


async def _follow(files: DriverFiles, hints: watch.Watch, looking: asyncio.Lock) -> None:
    async for _ in hints:
        async with looking:
            try:
                await files.look()
            except errors.CrustError as error:
                _log.error("cannot look at the drivers' files", extra={"error": error.shown()})


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("the drivers' files are not followed any more", exc_info=task.exception())
