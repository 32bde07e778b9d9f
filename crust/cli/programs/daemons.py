"""The start and the stop of every daemon of crust: settings, logs, SIGTERM and SIGINT, and the exit code."""

import asyncio
import gc
import logging
import os
import pkgutil
import resource
import signal
import sys
import tomllib
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from crust.cli.programs import PROGRAMS, STOP_S
from crust.core import errors, logs

if TYPE_CHECKING:  # pydantic takes a third of the time of a short command
    from crust.core.settings.program import ProgramSettings

_log = logging.getLogger(__name__)

_SWITCH_S = 0.0005
"""A thread that compares blocks, or walks a tree, would keep each hop of all other calls waiting for 5 ms."""

CONFIG_DIR = Path("/etc/crust")
"""Its `<program>.toml` is read without --config."""


def serve(program: str, flags: dict[str, Any]) -> None:
    """Load the settings, then run until a signal, and `stop_s` of the program longer at most.

    Exits 1 for a failed start, and 2 if the settings are refused; the log has the error.
    """
    # Modules are never garbage: searching them would take a tenth of the start, and a part of each later collection.
    gc.disable()
    try:
        run = pkgutil.resolve_name(PROGRAMS[program].run)
    finally:
        gc.freeze()
        gc.enable()
    # here, because prometheus_client would slow down `crust status`
    from crust.cli.programs import monitoring
    from crust.core import metrics
    from crust.core.settings.loading import InvalidSettings
    from crust.host.process import hidden
    from crust.rpc import tracing

    try:
        loaded = settings_of(program, flags)
    except InvalidSettings as error:
        logs.configure(fmt="json" if error.is_json else "console")
        _log.error("cannot serve", extra={"program": program, "error": error})
        sys.exit(2)
    hidden.except_groups(loaded.excepted_groups)
    logs.configure(
        level=loaded.log_level, fmt=loaded.log_format, on_drop=metrics.log_lines_dropped.inc
    )
    metrics.log_queue.show("", lambda: [((), logs.waiting_bytes())])
    _log.info("settings", extra={"program": program, **loaded.model_dump(mode="json")})
    os.umask(0o077)
    sys.setswitchinterval(_SWITCH_S)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it would have the secrets of volumes
    # The soft limit of 1,024 is for users of select(2). Connections, streams and devices of a node need more, and a
    # pod has no line for it.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    async def measured() -> None:
        with monitoring.serving(loaded.metrics_address):
            await run(loaded)  # from here on a signal ends the process in order

    try:
        # around the loop: its end may wait for a collector
        with tracing.exporting(program, is_on=loaded.traces):
            asyncio.run(until_signal(measured(), PROGRAMS[program].stop_s), debug=False)
    except errors.CrustError as error:
        _log.error("cannot serve", extra={"program": program, "error": error})
        sys.exit(2 if isinstance(error, InvalidSettings) else 1)


def settings_of(program: str, flags: dict[str, Any]) -> "ProgramSettings":
    """The settings of a daemon with these flags. Raises `InvalidSettings`."""
    config = flags.pop("config", None) or installed(program)
    chosen = {name: value for name, value in flags.items() if value not in (None, ())}
    return load(program, text(program, config) if config else "", environ=os.environ, flags=chosen)


def load(
    program: str,
    toml: str,
    *,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    **defaults: Any,
) -> "ProgramSettings":
    """The settings of a program, from the text of a file. Raises `InvalidSettings`."""
    from crust.core.settings import loading

    if program == "driver":
        defaults.setdefault("node_id", os.uname().nodename)
    model: type[ProgramSettings] = pkgutil.resolve_name(PROGRAMS[program].model)
    return loading.load(
        model, program, toml=toml, environ=environ or {}, flags=flags or {}, defaults=defaults
    )


def installed(program: str) -> Path | None:
    """The settings file that is read without --config."""
    from crust.host.files import listing

    path = CONFIG_DIR / f"{program}.toml"
    return path if listing.exists(path) else None


def text(program: str, path: Path) -> str:
    """The text of a settings file. Raises `InvalidSettings`."""
    from crust.core.settings.loading import InvalidSettings

    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise InvalidSettings(program, f"{path} cannot be read: {err}") from err


def make_pool(name: str, flags: dict[str, Any]) -> None:
    """Make the pool of this name that the settings have, and print its id. Raises `InvalidSettings`, and as
    `DirectoryPool.open`.

    A node's settings file is `driver.toml` if the driver is a process of its own, and `node.toml` with a table
    `driver` if `crust node` runs it. Either is read here; of several drivers in it the flag `state_dir` names one.
    """
    from crust.blockdriver.engines import files
    from crust.blockdriver.settings import LOCAL_ENGINES, DriverSettings
    from crust.core.settings.loading import InvalidSettings
    from crust.node.settings import NodeSettings

    config = flags.pop("config", None) or installed("driver") or installed("node")
    toml = text("driver", config) if config else ""
    environ: Mapping[str, str] = os.environ
    defaults: dict[str, Any] = {"socket": "/run/crust/driver/csi.sock"}
    names: set[str] = set()
    with suppress(tomllib.TOMLDecodeError):  # loading it reports the error
        names = set(tomllib.loads(toml))
    if names & (NodeSettings.model_fields.keys() - DriverSettings.model_fields.keys()):
        node = load("node", toml, environ=environ)
        assert isinstance(node, NodeSettings)
        local = {each.state_dir: each for each in node.driver if each.engine in LOCAL_ENGINES}
        place = str(flags.get("state_dir")) if len(local) > 1 else "".join(local)
        if place not in local:
            why = f"{config} is of a node with {len(local)} drivers that have a pool of the node, and one is needed"
            ways = (f"; for {local[path].driver_name} give --state-dir={path}" for path in local)
            raise InvalidSettings("driver init-pool", "".join([why, *ways]))
        toml, environ, defaults = "", {}, local[place].model_dump()
    settings = load("driver", toml, environ=environ, flags=flags, **defaults)
    assert isinstance(settings, DriverSettings)
    by_pool = settings.by_pool()
    if name not in by_pool:
        why = f"its settings have no pool {name}, but {', '.join(by_pool)}"
        raise InvalidSettings("driver init-pool", why)
    own = by_pool[name]
    pool = files.engine(own.state_dir, own.pool_id_file, create=True).home
    pool.open()
    click.echo(pool.ids.pool_id)
    pool.let_go()


async def until_signal(work: Awaitable[None], stop_s: float = STOP_S) -> None:
    """Run until done, or until SIGTERM or SIGINT cancels it; cancellation lets running operations finish.

    Later signals are ignored. A second cancellation would end the wait for operations, and with it a tool that writes
    to a volume. An operator who wants that sends SIGKILL.

    After `stop_s` the process ends as by kill -9: the kernel frees the locks, and no lock is free while this process
    writes. Otherwise a call that hangs would keep the successor waiting for ever.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)

    def stop() -> None:
        if task.cancelling():
            _log.warning("still stopping: operations that run are finished first")
        else:
            task.cancel()
            loop.call_later(stop_s, _kill, stop_s)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        _log.info("stopped")


def _kill(after_s: float) -> None:
    """End the process at once, and log the tasks that did not end."""
    running = sorted(task.get_name() for task in asyncio.all_tasks())
    _log.critical(
        "killed: it has not stopped in time", extra={"after_s": after_s, "tasks": running}
    )
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(1)
