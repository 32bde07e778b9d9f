"""How every daemon of crust starts and stops: settings, logs, SIGTERM and SIGINT, and the exit code."""

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from crust.core import errors, logs

if TYPE_CHECKING:  # pydantic takes a third of the time of a short command
    from crust.core.settings.program import ProgramSettings

_log = logging.getLogger(__name__)

STOP_S = 140.0
"""How long a process may stop: its operations end, and its callers leave. Its supervisor kills it 10 s later."""

STOP_OF_DRIVER_S = 890.0
"""The same where mkfs and e2fsck run."""

CONFIG_DIR = Path("/etc/crust")
"""Its `<program>.toml` is read where no --config is given."""

Settings = TypeVar("Settings", bound="ProgramSettings")


@contextmanager
def loading() -> Iterator[None]:
    """Around the import of a daemon's modules. They are garbage never: a collector that looks through them again and
    again takes a tenth of the start, and later a part of each of its rounds.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def serve(
    model: type[Settings],
    program: str,
    run: Callable[[Settings], Awaitable[None]],
    flags: dict[str, Any],
    *,
    defaults: Mapping[str, Any] | None = None,
    stop_s: float = STOP_S,
) -> None:
    """Load the settings, then run until a signal, and `stop_s` longer at most. Raises `InvalidSettings`; exits 1 for
    a failed start, and 2 if the daemon refuses its settings.
    """
    loaded = settings_of(model, program, flags, defaults=defaults)
    # here, because `crust status` should not pay for prometheus_client
    from crust.cli.programs import monitoring
    from crust.core import metrics
    from crust.core.settings.loading import InvalidSettings
    from crust.rpc import tracing

    logs.configure(
        level=loaded.log_level, fmt=loaded.log_format, on_drop=metrics.log_lines_dropped.inc
    )
    metrics.export_log_queue(logs.waiting_bytes)
    _log.info("settings", extra={"program": program, **loaded.model_dump(mode="json")})
    os.umask(0o077)

    async def measured() -> None:
        with monitoring.serving(loaded.metrics_address):
            await run(loaded)  # from here on a signal ends the process in order

    try:
        # around the loop: its end may wait for a collector
        with tracing.exporting(program, is_on=loaded.traces):
            asyncio.run(until_signal(measured(), stop_s), debug=False)
    except errors.CrustError as error:
        _log.error("cannot serve", extra={"program": program, "error": error})
        sys.exit(2 if isinstance(error, InvalidSettings) else 1)


def settings_of(
    model: type[Settings],
    program: str,
    flags: dict[str, Any],
    *,
    defaults: Mapping[str, Any] | None = None,
) -> Settings:
    """Load the settings. Raises `InvalidSettings`."""
    from crust.core.settings import loading

    config = flags.pop("config", None) or installed(program)
    flags = {name: value for name, value in flags.items() if value not in (None, ())}
    toml = text(program, config) if config else ""
    return loading.load(
        model, program, toml=toml, environ=os.environ, flags=flags, defaults=defaults
    )


def installed(program: str) -> Path | None:
    """The settings file that is read where none is named."""
    path = CONFIG_DIR / f"{program}.toml"
    return path if path.exists() else None


def text(program: str, path: Path) -> str:
    """A settings file. Raises `InvalidSettings`."""
    from crust.core.settings.loading import InvalidSettings

    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise InvalidSettings(program, f"{path} cannot be read: {err}") from err


async def until_signal(work: Awaitable[None], stop_s: float = STOP_S) -> None:
    """Run until done, or until SIGTERM or SIGINT cancels it; cancellation lets running operations finish.

    Later signals cancel nothing. A second one would end the wait for operations, and with it a tool that writes to
    somebody's volume. SIGKILL is there for those who want that.

    A stop that takes longer than `stop_s` ends as a kill -9 does: the kernel frees the locks, and no lock is free
    while this process writes. A call that hangs would otherwise keep the successor waiting for ever.
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
    """End the process at once, and say what did not end."""
    running = sorted(task.get_name() for task in asyncio.all_tasks())
    _log.critical(
        "killed: it has not stopped in time", extra={"after_s": after_s, "tasks": running}
    )
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(1)
