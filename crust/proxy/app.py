"""Composes the proxy; the only module that knows all of its parts. The order in this file is the order of the start.

The order matters: first the locks (one proxy per run directory, and one per handoff directory, which two proxies may
share by mistake), then the scan of the handoff directory, then the sockets for runtimes and for storage, and the CO's
sockets last: when a CO can call the proxy, the proxy knows which volumes are deferred. A stop goes in the opposite
order and waits for every running operation.
"""

import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from crust import metrics, volumes
from crust.deferral_keys import Defer
from crust.handoff import store as stores
from crust.host.block import devices as host_devices
from crust.host.files import durable
from crust.host.mounts import propagation
from crust.host.process import systemd, workers
from crust.host.process.workers import Workers
from crust.proxy.csi.backend import Backend
from crust.proxy.csi.expand import DeferredExpand
from crust.proxy.csi.frontend import CsiFrontend, DeferredCalls
from crust.proxy.csi.policy import Policy, Runtimes
from crust.proxy.csi.publish import DeferredPublish
from crust.proxy.csi.unpublish import DeferredUnpublish
from crust.proxy.deferrals.deferred import DeferredVolumes
from crust.proxy.deferrals.devices import Devices
from crust.proxy.deferrals.entry_checks import EntryChecks
from crust.proxy.deferrals.events import Events
from crust.proxy.deferrals.handoff_watch import watch_handoff
from crust.proxy.deferrals.targets import GuardedTargets, Targets
from crust.proxy.drivers.driver_sockets import DriverSockets
from crust.proxy.inspect import Inspect
from crust.proxy.runtime_api import Mutations, RuntimeApi
from crust.proxy.runtimes.freeze import DeferredFreeze
from crust.proxy.runtimes.handlers import Handlers
from crust.proxy.runtimes.io_limits import DeferredIoLimits
from crust.proxy.runtimes.peers import HandlerPeers
from crust.proxy.runtimes.registry import HandlerRegistry
from crust.proxy.runtimes.volume_health import DeferredHealth
from crust.rpc import wiring
from crust.rpc.serving.daemon import Daemon, starting
from crust.rpc.serving.health import Health
from crust.rpc.serving.server import AddServicer
from crust.rpc.serving.worker_watch import WorkerWatch
from crust.settings.loading import InvalidSettings
from crust.settings.proxy import ProxySettings, ServedDriver
from crust.supervised import supervised
from crust.wire.v1 import handlers_pb2_grpc, inspect_pb2_grpc, runtime_pb2_grpc

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sockets:
    """The proxy's own sockets, one for each kind of peer, so that each peer can call only its own API."""

    runtime: str
    handlers: str
    inspect: str

    @classmethod
    def below(cls, run_dir: str) -> "Sockets":
        """The sockets in the run directory."""
        return cls(f"{run_dir}/runtime.sock", f"{run_dir}/handlers.sock", f"{run_dir}/inspect.sock")


async def run(settings: ProxySettings) -> None:
    """Serve until cancelled. If the start fails, it raises the reason and leaves no socket served."""
    await check(settings)
    async with running(settings) as daemon:
        await daemon.forever()


async def check(settings: ProxySettings) -> None:
    """Raise what would make a running proxy useless on this host."""
    if settings.check_propagation:
        await workers.run(propagation.check, settings.target_roots)


@asynccontextmanager
async def running(
    settings: ProxySettings,
    *,
    targets: Targets | None = None,
    devices: Devices = host_devices,
    threads: Workers | None = None,
) -> AsyncIterator[Daemon]:
    """Run the proxy while the block runs. `targets` and `devices` are the kernel's unless they are given."""
    async with (
        owning(settings) as daemon,
        part(settings, daemon, targets=targets, devices=devices, threads=threads),
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
    targets: Targets | None = None,
    devices: Devices = host_devices,
    threads: Workers | None = None,
    wires: wiring.Wiring = wiring.SOCKETS,
) -> AsyncIterator[None]:
    """Serve as a part of the process `daemon` while the block runs."""
    targets = targets or GuardedTargets(settings.target_roots)
    pool = threads or Workers("the proxy", limit=64)
    store = stores.Store(settings.volumes_root)
    async with AsyncExitStack() as stack:
        watch = WorkerWatch(pool, daemon.health, ping=systemd.ping_watchdog)
        await stack.enter_async_context(watch.running())  # ends when all operations have ended
        with pool.used():  # by the loops and the servers that are started here
            deferred = DeferredVolumes(store, devices, pool)
            watch.operations.append(lambda: [deferred.operations])
            await _load(deferred, targets, settings.target_roots, stack)
            events = Events()
            handlers = Handlers(grace_s=settings.handler_grace_s)
            peers = HandlerPeers()
            stack.push_async_callback(peers.close)
            stack.push_async_callback(deferred.operations.drain)
            parts = _Parts(deferred, handlers, peers, events, targets, devices, daemon)
            runtimes = await _runtimes(settings, stack, daemon.health, wires)
            drivers = _driver_sockets(settings, parts, runtimes, wires)
            await stack.enter_async_context(_watched(store, parts))
            await _serve_proxy_sockets(settings, parts, drivers, wires, stack)
            await _serve_drivers(settings, drivers, stack)
            _export_metrics(deferred, drivers)
            metrics.export_workers("proxy", lambda: pool.load)
            daemon.readiness.append(drivers.missing)
        extra = {"drivers": len(drivers.all()), "entries": len(deferred.all())}
        _log.info("proxy serves", extra=extra)
        yield


def _export_metrics(deferred: DeferredVolumes, drivers: DriverSockets) -> None:
    def states() -> Iterable[metrics.Sample]:
        none = {(each.served.name, "published"): 0 for each in drivers.all()}
        return [(labels, number) for labels, number in {**none, **deferred.states()}.items()]

    metrics.deferred_volumes.source = states
    metrics.reservations.set_function(deferred.reservations)
    metrics.export(*metrics.PROXY)
    metrics.export_operations("proxy", deferred.operations.running)


@dataclass(frozen=True, slots=True)
class _Parts:
    deferred: DeferredVolumes
    handlers: Handlers
    peers: HandlerPeers
    events: Events
    targets: Targets
    devices: Devices
    daemon: Daemon


def _watched(store: stores.Store, parts: _Parts) -> AbstractAsyncContextManager[None]:
    checks = EntryChecks(
        parts.deferred, parts.targets, parts.devices, parts.events, parts.daemon.health
    )
    return watch_handoff(
        store,
        parts.deferred,
        parts.events,
        parts.daemon.health,
        check=checks.check,
        end=parts.daemon.end,
    )


async def _load(
    deferred: DeferredVolumes, targets: Targets, roots: Sequence[str], stack: AsyncExitStack
) -> None:
    """Open and lock the handoff directory, finish what a crash has interrupted, and load the deferred volumes."""
    store = deferred.store

    def prepare() -> Iterable[str]:
        store.open()
        stack.callback(store.lock().close)
        for path in store.remove_orphans(targets.unmount_guard):
            _log.warning("orphan kept", extra={"path": path})
        return targets.guards()

    guarded = await workers.run(prepare)
    await workers.run(deferred.raw.find, roots)
    deferred.unfinished.update(guarded)
    for entry in await deferred.look():
        if entry.error is not None:
            _log.error("unreadable entry", extra={"entry": entry.digest, "error": str(entry.error)})


async def _serve_proxy_sockets(
    settings: ProxySettings,
    parts: _Parts,
    drivers: DriverSockets,
    wires: wiring.Wiring,
    stack: AsyncExitStack,
) -> None:
    sockets = Sockets.below(settings.run_dir)

    async def serve(name: str, path: str, add_servicer: AddServicer) -> None:
        serving = wires.serving(path, add_servicer, name=name, daemon=parts.daemon)
        await stack.enter_async_context(serving)

    common = (parts.deferred, parts.handlers, parts.peers)
    freeze, io_limits = (
        DeferredFreeze(*common, parts.events),
        DeferredIoLimits(*common, parts.events, parts.deferred.operations),
    )
    expand = DeferredExpand(*common, parts.devices, parts.deferred.operations)
    runtime = RuntimeApi(*common, Mutations(expand, freeze, io_limits))
    registry = HandlerRegistry(
        parts.handlers, parts.peers, parts.events, parts.deferred, settings.volumes_root
    )
    inspect = Inspect(drivers, parts.handlers, parts.deferred, parts.events, parts.daemon.health)
    await serve(
        "handlers",
        sockets.handlers,
        lambda to: handlers_pb2_grpc.add_HandlerRegistryServicer_to_server(registry, to),
    )
    stack.callback(registry.stop)
    await serve(
        "inspect",
        sockets.inspect,
        lambda to: inspect_pb2_grpc.add_InspectServicer_to_server(inspect, to),
    )
    stack.callback(inspect.stop)
    await serve(
        "runtime",
        sockets.runtime,
        lambda to: runtime_pb2_grpc.add_RuntimeServicer_to_server(runtime, to),
    )


async def _runtimes(
    settings: ProxySettings, stack: AsyncExitStack, health: Health, wires: wiring.Wiring
) -> Runtimes | None:
    if settings.kubernetes is None:
        return None
    try:
        from crust.kubernetes_api import api, pod_runtimes
        from crust.proxy.drivers import csi_driver_check
    except ImportError as error:
        raise InvalidSettings(
            "proxy", "kubernetes is set, and its client is missing: install crust-csi[kubernetes]"
        ) from error
    client = await workers.run(api.client, settings.kubernetes.kubeconfig)
    stack.push_async_callback(client.close)
    found = pod_runtimes.PodRuntimes(client, settings.kubernetes.node_name)
    await stack.enter_async_context(found.following(health))

    async def check() -> None:
        await csi_driver_check.log_mismatches(client, settings.drivers, wires)

    await stack.enter_async_context(supervised("check of the CSIDriver objects", check, health))
    return found


def _driver_sockets(
    settings: ProxySettings,
    parts: _Parts,
    runtimes: Runtimes | None,
    wires: wiring.Wiring,
) -> DriverSockets:
    known = settings.kubernetes
    deferring = frozenset(known.runtime_handlers) if known else frozenset()
    unpublish = DeferredUnpublish(parts.deferred, parts.events, parts.targets)
    publish = DeferredPublish(
        parts.deferred, parts.handlers, parts.events, parts.targets, unpublish, parts.devices
    )

    health = DeferredHealth(parts.deferred, parts.handlers, parts.peers)
    calls = DeferredCalls(publish, unpublish, health)

    def frontend(served: ServedDriver, backend: Backend) -> CsiFrontend:
        default = Defer(served.defer) if served.defer else None
        decisions = Policy(default, runtimes, deferring)
        name = volumes.DriverName(served.name)
        return CsiFrontend(name, backend, parts.deferred, calls, parts.targets, decisions)

    return DriverSockets(
        frontend,
        parts.daemon,
        run_dir=settings.run_dir,
        plugins_registry=settings.plugins_registry,
        connect=wires.connect,
    )


async def _serve_drivers(
    settings: ProxySettings, drivers: DriverSockets, stack: AsyncExitStack
) -> None:
    stack.push_async_callback(drivers.aclose)
    for served in settings.drivers:
        await drivers.add(served)
