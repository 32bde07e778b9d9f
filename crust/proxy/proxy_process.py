"""Composes the proxy; the only module that knows all of its parts. The order in this file is the order of the start.

The order matters: first the locks (one proxy per run directory, and one per handoff directory, which two proxies may
share by mistake), then the scan of the handoff directory, then the sockets for runtimes and for storage, and the CO's
sockets last: when a CO can call the proxy, the proxy knows which volumes are deferred. A stop goes in the opposite
order and waits for every running operation.
"""

import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from crust.core import metrics, operations
from crust.core.deferral_keys import Defer
from crust.core.supervised import Health
from crust.handoff import store as stores
from crust.host import start_questions
from crust.host.block import devices as host_devices
from crust.host.files import durable
from crust.host.files.locks import ToolLocks
from crust.host.mounts import propagation
from crust.host.process import systemd, workers
from crust.host.process.workers import Workers
from crust.kubernetes_api import api, pod_runtimes
from crust.proxy.filesystems import Filesystems
from crust.proxy.guard import Devices, Targets
from crust.proxy.handlers import HandlerRegistry, Handlers
from crust.proxy.host_publish import HostPublish
from crust.proxy.inspect import Inspect
from crust.proxy.look import Reconciler
from crust.proxy.policy import Policy
from crust.proxy.publish import Publish
from crust.proxy.runtime_api import RuntimeApi
from crust.proxy.service import CsiService
from crust.proxy.settings import ProxySettings, ServedDriver
from crust.proxy.sockets import DriverSockets
from crust.proxy.table import Entries, Events, Table
from crust.proxy.unpublish import Unpublish
from crust.rpc.serving.daemon import Daemon, starting
from crust.rpc.serving.server import SOCKETS, Ports
from crust.rpc.serving.service import Service, methods_of
from crust.rpc.serving.worker_watch import WorkerWatch
from crust.wire.v1 import handlers_pb2, inspect_pb2, runtime_pb2

_log = logging.getLogger(__name__)
_HANDLERS = handlers_pb2.DESCRIPTOR.services_by_name["HandlerRegistry"]
_INSPECT = inspect_pb2.DESCRIPTOR.services_by_name["Inspect"]
_RUNTIME = runtime_pb2.DESCRIPTOR.services_by_name["Runtime"]


@dataclass(frozen=True, slots=True)
class Host:
    """The parts of this host that the proxy reads and changes."""

    targets: Targets
    filesystems: Filesystems
    devices: Devices = host_devices

    @classmethod
    def of(cls, settings: ProxySettings) -> Self:
        locks = ToolLocks(Path(settings.run_dir, "tools.lock"))
        return cls(Targets(settings.target_roots), Filesystems(locks))


async def run(settings: ProxySettings) -> None:
    """Serve until cancelled. If the start fails, it raises the reason and leaves no socket served."""
    await check_propagation(settings)
    async with running(settings) as daemon:
        await start_questions.report(start_questions.PROXY_QUESTIONS, daemon.health)
        await daemon.forever()


async def check_propagation(settings: ProxySettings) -> None:
    """Raise if mounts of the proxy cannot reach this host."""
    if settings.check_propagation:
        await workers.run(propagation.check_propagation, settings.target_roots)


@asynccontextmanager
async def running(
    settings: ProxySettings, *, host: Host | None = None, threads: Workers | None = None
) -> AsyncIterator[Daemon]:
    async with (
        owning(settings) as daemon,
        part(settings, daemon, host=host, threads=threads),
        daemon.serves(),
    ):
        yield daemon


@asynccontextmanager
async def owning(settings: ProxySettings) -> AsyncIterator[Daemon]:
    """The process that has the run directory while the block runs; raises as `starting`."""
    await workers.run(durable.make_directory, settings.run_dir, 0o700)
    async with starting(f"{settings.run_dir}/proxy.lock") as daemon:
        yield daemon


@asynccontextmanager
async def part(
    settings: ProxySettings,
    daemon: Daemon,
    *,
    host: Host | None = None,
    threads: Workers | None = None,
    ports: Ports = SOCKETS,
) -> AsyncIterator[None]:
    """Serve as a part of the process `daemon` while the block runs."""
    host = host or Host.of(settings)
    pool = threads or Workers("the proxy", limit=64)
    async with AsyncExitStack() as stack:
        running = operations.KeyedOperations(pool)
        watch = WorkerWatch(pool, running, daemon.health, ping=systemd.ping_watchdog)
        await stack.enter_async_context(watch.running())  # ends when all operations have ended
        with pool.used():  # by the loops and the servers that are started here
            store, table, events = stores.Store(settings.volumes_root), Table(), Events()
            host_parts = (host.targets, host.filesystems, host.devices)
            entries = Entries(store, table, *host_parts, running, events, daemon.health)
            reconciler = Reconciler(entries)
            await _load(entries, reconciler, stack)
            handlers = Handlers(grace_s=settings.handler_grace_s)
            stack.push_async_callback(running.drain)
            on_host = HostPublish(entries, Publish(entries, handlers, Unpublish(entries)))
            runtime = RuntimeApi(entries, handlers)
            policy_of = await _policies(settings, stack, daemon.health)
            drivers = DriverSockets(
                lambda served, backend: CsiService(
                    backend, on_host, runtime, policy_of(served), served.name
                ),
                daemon,
                settings.run_dir,
                settings.plugins_registry,
                ports.connect,
            )
            await stack.enter_async_context(reconciler.following(end=daemon.end))
            registry = HandlerRegistry(handlers, entries)
            inspect = methods_of(Inspect(entries, drivers, handlers, reconciler), _INSPECT)
            for name, methods, stop in (
                ("handlers", methods_of(registry, _HANDLERS), registry.stop),
                ("inspect", inspect, events.end),
                ("runtime", methods_of(runtime, _RUNTIME), None),
            ):
                service = Service(name, methods, health=daemon.health)
                path = f"{settings.run_dir}/{name}.sock"
                await stack.enter_async_context(ports.serving(path, service))
                if stop is not None:  # it ends the streams before their socket ends
                    stack.callback(stop)
            stack.push_async_callback(drivers.aclose)
            for served in settings.drivers:
                await drivers.add(served)
            _export_metrics(table, drivers, running, pool)
            daemon.readiness.append(drivers.missing)
        _log.info(
            "proxy serves", extra={"drivers": len(drivers.all()), "entries": len(table.entries())}
        )
        yield


def _export_metrics(
    table: Table, drivers: DriverSockets, running: operations.KeyedOperations, pool: Workers
) -> None:
    def states() -> Iterable[metrics.Sample]:
        zeros = {(driver.served.name, "published"): 0 for driver in drivers.all()}
        return [(labels, number) for labels, number in {**zeros, **table.states()}.items()]

    metrics.deferred_volumes.show("proxy", states)
    metrics.reservations.set_function(table.reservations)
    metrics.export(*metrics.PROXY)
    metrics.export_operations("proxy", running.running)
    metrics.export_workers("proxy", lambda: pool.load)


async def _load(entries: Entries, reconciler: Reconciler, stack: AsyncExitStack) -> None:
    """Open and lock the handoff directory, finish removals that a crash has interrupted, and make the first look.

    Then each guard of an earlier process is a row of the table, too.
    """
    store = entries.store

    def prepare() -> None:
        store.open()
        stack.callback(store.lock().close)
        for path in store.remove_orphans(entries.targets.unmount_guard):
            _log.warning("an unfinished entry stays", extra={"path": path})
        entries.targets.settle_seals()

    await workers.run(prepare)
    await reconciler.look()
    for entry in entries.table.entries():
        if entry.error is not None:
            _log.error("unreadable entry", extra={"entry": entry.digest, "error": str(entry.error)})


async def _policies(
    settings: ProxySettings, stack: AsyncExitStack, health: Health
) -> Callable[[ServedDriver], Policy]:
    """Gives each driver its policy; follows the pods of the node where the settings give access to Kubernetes."""
    runtimes, deferring = None, frozenset[str]()
    if settings.kubernetes is not None:
        client = await workers.run(api.client, settings.kubernetes.kubeconfig)
        stack.push_async_callback(client.close)
        runtimes = pod_runtimes.PodRuntimes(client, settings.kubernetes.node_name)
        await stack.enter_async_context(runtimes.following(health))
        deferring = frozenset(settings.kubernetes.runtime_handlers)
    return lambda served: Policy(Defer(served.defer) if served.defer else None, runtimes, deferring)
