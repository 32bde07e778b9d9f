"""The daemon `crust kata`: placeholders, the NRI plugin, and a registration for each of Kata's runtimes.

Its parts begin so that each one needs only the earlier ones: the recovery of claims, placeholders for the published
volumes, the plugin, and the registrations last, when the container engine has accepted the plugin: a registered
handler gets volumes. A runtime whose configuration would share the host's directory is not registered. Stopping the
daemon ends no claim: the keepers go on.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import crust
from crust.core import errors, volumes
from crust.core.supervised import supervised
from crust.handoff.store import Store
from crust.host import start_questions
from crust.host.files import durable
from crust.host.process import workers
from crust.kata import nri
from crust.kata.entry import KEY_BYTES_MAX, KataEntries
from crust.kata.evidence import Kind, Runtimes
from crust.kata.gate import Bridge, Report
from crust.kata.go_runtime import GoRuntime
from crust.kata.grants import Grants
from crust.kata.keeper_watch import KeeperWatch
from crust.kata.placeholders import Placeholders
from crust.kata.preflight import Configurations, Installation
from crust.kata.rust_runtime import RustRuntime
from crust.kata.settings import KataSettings
from crust.kata.statistics import KataHandler
from crust.rpc.serving.daemon import Daemon, starting
from crust.runtime_handler import registration, service
from crust.runtime_handler.registration import Feature

FEATURES = frozenset({Feature.READ_ONLY, Feature.GROUP, Feature.GROUP_CHANGE_POLICY, Feature.STATS})
"""The features of Kata's Go runtime for a direct volume, with every hypervisor."""
FEATURES_RS = frozenset({Feature.READ_ONLY, Feature.STATS})
"""The features of runtime-rs since 4.0: it never applies a group."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


async def run(settings: KataSettings) -> None:
    """Serve until cancelled. Raises `KataUnfit` if none of the runtimes can be served."""
    async with running(settings) as daemon:
        await start_questions.report(start_questions.OF_RUNTIME, daemon.health)
        await daemon.forever()


@contextlib.asynccontextmanager
async def running(settings: KataSettings) -> AsyncIterator[Daemon]:
    """Serve while the block runs. The block begins when the container engine has accepted the plugin."""
    run_dir = Path(settings.run_dir)
    await workers.run(durable.make_directories, run_dir / "keepers", 0o700)
    async with starting(str(run_dir / "kata.lock")) as daemon, AsyncExitStack() as stack:
        enter = stack.enter_async_context
        configurations = Configurations(settings.runtimes)
        features = await _fit(settings, configurations, daemon)
        store, entries = Store(settings.volumes_root), KataEntries(settings.kata_volumes)
        await workers.run(entries.open)
        runtimes = Runtimes(
            [
                GoRuntime(settings.kata_sandboxes),
                RustRuntime(settings.kata_rs_sandboxes, settings.kata_shares),
            ]
        )
        grants = Grants(store, run_dir / "keepers", entries, features)

        report = _reporting(daemon)
        watch = KeeperWatch(grants, runtimes)
        await watch.look_at_keepers()
        await workers.run(grants.hide_unclaimed)
        placeholders = Placeholders(store, entries, features, report)
        await workers.run(placeholders.look_at_volumes)
        await enter(supervised("watch of keepers", watch.keep, daemon.health))
        await enter(supervised("placeholders", placeholders.keep, daemon.health))
        gate = Bridge(grants, runtimes, configurations, settings.default_runtime, report)
        plugin = _Plugin(settings.nri_socket, gate, daemon)
        await enter(supervised("NRI plugin", plugin.keep, daemon.health))
        # an engine that is away must not keep the node's start waiting
        await enter(daemon.serves())
        await plugin.is_registered.wait()
        kata_handler = KataHandler(store, runtimes, gate.uses)
        stack.push_async_callback(kata_handler.close)
        for handler, offered in features.items():
            await _registered(handler, offered, kata_handler, settings, stack)
        yield daemon


def _reporting(daemon: Daemon) -> Report:
    """Report from any thread."""
    loop = asyncio.get_running_loop()

    def report(part: str, problem: errors.CrustError | None) -> None:
        loop.call_soon_threadsafe(_report, daemon, part, problem)

    return report


def _report(daemon: Daemon, part: str, problem: errors.CrustError | None) -> None:
    daemon.health.report(part, problem, is_fatal=False)


async def _fit(
    settings: KataSettings, configurations: Configurations, daemon: Daemon
) -> dict[volumes.HandlerName, frozenset[Feature]]:
    """The features of the handlers whose installation of Kata can be served; raises the last problem without any."""
    fit: dict[volumes.HandlerName, frozenset[Feature]] = {}
    problem = None
    for runtime in settings.runtimes:
        name = volumes.HandlerName(runtime.name)
        try:
            installation = await workers.run(configurations.check_kata, name)
        except errors.CrustError as error:
            _report(daemon, f"runtime {name}", error)
            problem = error
        else:
            fit[name] = _features(installation)
    if not fit and problem is not None:
        raise problem
    return fit


def _features(installation: Installation) -> frozenset[Feature]:
    if installation.kind is Kind.GO:
        return FEATURES
    return FEATURES_RS if installation.version >= (4, 0) else FEATURES_RS - {Feature.READ_ONLY}


async def _registered(
    name: volumes.HandlerName,
    features: frozenset[Feature],
    handler: service.Handler,
    settings: KataSettings,
    stack: AsyncExitStack,
) -> None:
    endpoint = f"{settings.run_dir}/{name}.sock"
    request = registration.RegisterRequest(
        name=name,
        version=crust.__version__,
        endpoint=endpoint,
        filesystems=frozenset(settings.filesystems),
        features=features,
        max_target_path_bytes=KEY_BYTES_MAX,
    )
    await stack.enter_async_context(service.serving(endpoint, handler))
    await stack.enter_async_context(registration.registered(settings.handlers_socket, request))


class _Plugin:
    """The connection to the container engine, made again when it ends."""

    def __init__(self, socket: str, gate: nri.Gate, daemon: Daemon) -> None:
        self._socket, self._gate, self._daemon = socket, gate, daemon
        self.is_registered = asyncio.Event()

    async def keep(self) -> None:
        """Serve until cancelled. While the engine is away, this process reports a problem and goes on."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await nri.serve(self._socket, self._gate, self._on_registered)
                pause_s = _FIRST_PAUSE_S
            except errors.CrustError as error:
                _report(self._daemon, "container engine", error)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    def _on_registered(self) -> None:
        self.is_registered.set()
        _report(self._daemon, "container engine", None)
