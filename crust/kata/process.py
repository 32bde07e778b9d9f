"""The daemon `crust kata`: placeholders, the NRI plugin, and a registration for each of Kata's runtimes.

Its parts begin so that each one needs only the earlier ones: the recovery of claims, placeholders for the published
volumes, the plugin, and the registrations last, when the container engine has accepted the plugin: a registered
handler gets volumes. A runtime whose configuration would share the host's directory is not registered; volumes that
were published to it before are refused to its containers, so the plugin serves without any fit runtime too. Stopping
the daemon ends no claim: the keepers go on.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import crust
from crust.core import errors, volumes
from crust.core.supervised import Health, supervised
from crust.handoff.store import Store
from crust.host import start_questions
from crust.host.files import durable
from crust.host.process import workers
from crust.kata import nri
from crust.kata.entry import KEY_BYTES_MAX, KataEntries, Placeholders
from crust.kata.evidence import KataBuilds
from crust.kata.gate import KataGate, Report
from crust.kata.go_runtime import GoRuntime
from crust.kata.grants import Grants
from crust.kata.keeper_watch import KeeperWatch
from crust.kata.preflight import Configurations
from crust.kata.rust_runtime import RustRuntime
from crust.kata.settings import KataSettings
from crust.kata.statistics import KataHandler
from crust.rpc.serving.daemon import Daemon, starting
from crust.runtime_handler import registration, service

_PAUSE_S = 0.1
"""Before the next connection to a container engine that is away: until then it may start containers unasked."""

_VOLUMES_MAX = 24
"""Of a pod. A container with all of them is created within the engine's time, and a PCI bus has places for them."""


async def run(settings: KataSettings) -> None:
    """Serve until cancelled."""
    async with running(settings) as daemon:
        await start_questions.report(start_questions.RUNTIME_QUESTIONS, daemon.health)
        await daemon.forever()


@contextlib.asynccontextmanager
async def running(settings: KataSettings) -> AsyncIterator[Daemon]:
    """Serve while the block runs. The block begins when the container engine has accepted the plugin."""
    run_dir = Path(settings.run_dir)
    await workers.run(durable.make_directories, run_dir / "keepers", 0o700)
    async with starting(str(run_dir / "kata.lock")) as daemon, AsyncExitStack() as stack:
        enter = stack.enter_async_context
        loop = asyncio.get_running_loop()

        def report(part: str, problem: errors.CrustError | None) -> None:
            # from any thread
            told = partial(daemon.health.report, part, problem, is_fatal=False)
            loop.call_soon_threadsafe(told)

        configurations = Configurations(settings.runtimes)
        requests = await workers.run(_requests, settings, configurations, report)
        store, entries = Store(settings.volumes_root), KataEntries(settings.kata_volumes)
        await workers.run(entries.open)
        rust_runtime = RustRuntime(settings.kata_rs_sandboxes, settings.kata_shares)
        builds = KataBuilds([GoRuntime(settings.kata_sandboxes), rust_runtime])
        grants = Grants(store, run_dir / "keepers", entries)
        watch = KeeperWatch(grants, builds)
        await watch.look_at_keepers()
        await workers.run(grants.hide_unclaimed)
        placeholders = Placeholders(store, entries, configurations.handlers, report)
        await workers.run(placeholders.look_at_volumes)
        await enter(supervised("watch of crust keeper", watch.keep, daemon.health))
        await enter(supervised("Kata's entries", placeholders.keep, daemon.health))
        gate = KataGate(grants, builds, configurations, settings.default_runtime, report)
        is_registered = asyncio.Event()
        plugin = partial(_keep_plugin, settings.nri_socket, gate, daemon.health, is_registered)
        await enter(supervised("NRI plugin", plugin, daemon.health))
        # an engine that is away must not keep the node's start waiting
        await enter(daemon.serves())
        await is_registered.wait()
        kata_handler = KataHandler(
            store,
            builds,
            gate.uses,
            lambda: (*daemon.health.problems.values(), *configurations.unfit()),
        )
        stack.push_async_callback(kata_handler.close)
        for request in requests:
            await enter(service.serving(request.endpoint, kata_handler))
            await enter(registration.Registration(settings.handlers_socket, request))
        yield daemon


def _requests(
    settings: KataSettings, configurations: Configurations, report: Report
) -> list[registration.RegisterRequest]:
    """The registrations of the handlers whose installation of Kata fits; reports why others do not. Blocks."""
    requests = []
    for runtime in settings.runtimes:
        handler = volumes.HandlerName(runtime.name)
        try:
            installation = configurations.check_kata(handler)
        except errors.CrustError as error:
            report(f"runtime {handler}", error)
            continue
        if installation.flushes_dropped is not None:
            report(f"runtime {handler}", installation.flushes_dropped)
        request = registration.RegisterRequest(
            name=handler,
            version=crust.__version__,
            endpoint=f"{settings.run_dir}/{handler}.sock",
            filesystems=frozenset(settings.filesystems),
            features=installation.features,
            max_volumes_per_sandbox=_VOLUMES_MAX,
            max_target_path_bytes=KEY_BYTES_MAX,
            guest_kernel=runtime.guest_kernel,
        )
        requests.append(request)
    return requests


async def _keep_plugin(
    socket: str, gate: nri.Gate, health: Health, is_registered: asyncio.Event
) -> None:
    """Serve until cancelled. While the engine is away, this process reports a problem and goes on."""

    def on_registered() -> None:
        is_registered.set()
        health.report("container engine", None, is_fatal=False)

    while True:
        try:
            await nri.serve(socket, gate, on_registered)
        except errors.CrustError as error:
            health.report("container engine", error, is_fatal=False)
        await asyncio.sleep(_PAUSE_S)
