"""Composes the proxy; the only module that knows all of its parts. The order in this file is the order of the start.

The order matters: first the locks (one proxy per run directory, and one per handoff directory, which two proxies may
share by mistake), then the scan of the handoff directory, then the sockets for runtimes and for storage, and the CO's
sockets last: when a CO can call the proxy, the proxy knows which volumes are deferred. A stop goes in the opposite
order and waits for every running operation.
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from crust import operations, volumes
from crust.handoff import store as stores
from crust.host.block import devices as host_devices
from crust.host.files import durable
from crust.host.mounts import propagation
from crust.proxy.backend import Backend
from crust.proxy.csi_frontend import CsiFrontend
from crust.proxy.deferred import DeferredVolumes
from crust.proxy.devices import Devices
from crust.proxy.events import Events
from crust.proxy.expand import DeferredExpand
from crust.proxy.freeze import DeferredFreeze
from crust.proxy.handlers import Handlers
from crust.proxy.handoff_watch import watch_handoff
from crust.proxy.inspect import Driver, Inspect
from crust.proxy.io_limits import DeferredIoLimits
from crust.proxy.peers import HandlerPeers
from crust.proxy.publish import DeferredPublish
from crust.proxy.registry import HandlerRegistry
from crust.proxy.runtime_api import Mutations, RuntimeApi
from crust.proxy.stage import RuntimeStage
from crust.proxy.targets import GuardedTargets, Targets
from crust.proxy.unpublish import DeferredUnpublish
from crust.rpc import channel, server
from crust.rpc.daemon import Daemon, starting
from crust.rpc.gate import Gate
from crust.settings import ProxySettings
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
    if settings.check_propagation:
        await asyncio.to_thread(propagation.check, settings.target_roots)
    async with running(settings) as daemon:
        await daemon.forever()


@asynccontextmanager
async def running(
    settings: ProxySettings, *, targets: Targets | None = None, devices: Devices = host_devices
) -> AsyncIterator[Daemon]:
    """Run the proxy while the block runs. `targets` and `devices` are the kernel's unless they are given."""
    targets = targets or GuardedTargets(settings.target_roots)
    store = stores.Store(settings.volumes_root)
    async with AsyncExitStack() as stack:
        await asyncio.to_thread(durable.make_directory, settings.run_dir, 0o700)
        lock_path = f"{settings.run_dir}/proxy.lock"
        daemon = await stack.enter_async_context(starting(lock_path, take_over=settings.take_over))
        deferred = await _load(store, daemon)
        events = Events()
        handlers = Handlers(grace_s=settings.handler_grace_s)
        peers = HandlerPeers()
        stack.push_async_callback(peers.close)
        backends = _backends(settings, stack)
        parts = _Parts(deferred, handlers, peers, events, backends, targets, devices, daemon)
        await daemon.owned.enter_async_context(watch_handoff(store, deferred, events))
        await _serve_proxy_sockets(settings, parts, stack)
        await _serve_csi_sockets(settings, parts, stack)
        await stack.enter_async_context(daemon.serves())
        _log.info("proxy serves", extra={"drivers": len(backends), "entries": len(deferred.all())})
        yield daemon


@dataclass(frozen=True, slots=True)
class _Parts:
    deferred: DeferredVolumes
    handlers: Handlers
    peers: HandlerPeers
    events: Events
    backends: Sequence[Driver]
    targets: Targets
    devices: Devices
    daemon: Daemon


async def _load(store: stores.Store, daemon: Daemon) -> DeferredVolumes:
    """Open and lock the handoff directory, remove the orphans of a crash, and load the deferred volumes."""

    def prepare() -> None:
        store.open()
        daemon.owned.callback(store.lock().close)
        for path in store.remove_orphans():
            _log.warning("orphan kept", extra={"path": path})

    await asyncio.to_thread(prepare)
    deferred = DeferredVolumes(store)
    for entry in await deferred.load():
        if entry.error is not None:
            _log.error("unreadable entry", extra={"entry": entry.digest, "error": str(entry.error)})
    return deferred


def _backends(settings: ProxySettings, stack: AsyncExitStack) -> Sequence[Driver]:
    drivers = []
    for served in settings.drivers:
        backend = Backend(channel.connect(served.backend))
        stack.push_async_callback(backend.aclose)
        drivers.append(Driver(served.name, served.socket, served.backend, backend))
    return drivers


async def _serve_proxy_sockets(
    settings: ProxySettings, parts: _Parts, stack: AsyncExitStack
) -> None:
    sockets = Sockets.below(settings.run_dir)
    staging = operations.KeyedOperations()
    stack.push_async_callback(staging.drain)
    parts.daemon.when_settled(staging.idle)
    stage = RuntimeStage(parts.deferred, parts.handlers, staging, parts.targets, parts.devices)
    common = (parts.deferred, parts.handlers, parts.peers)
    freeze, io_limits = (
        DeferredFreeze(*common, parts.events),
        DeferredIoLimits(*common, parts.events, staging),
    )
    expand = DeferredExpand(*common, parts.devices, staging)
    runtime = RuntimeApi(*common, Mutations(stage, expand, freeze, io_limits))
    registry = HandlerRegistry(parts.handlers, parts.peers, parts.events, settings.volumes_root)
    inspect = Inspect(
        parts.backends, parts.handlers, parts.deferred, parts.events, parts.daemon.health
    )
    await stack.enter_async_context(
        server.serving(
            sockets.handlers,
            lambda to: handlers_pb2_grpc.add_HandlerRegistryServicer_to_server(registry, to),
            name="handlers",
            daemon=parts.daemon,
            gate=Gate(stage=2),
        )
    )
    stack.callback(registry.stop)
    parts.daemon.when_handed_over(registry.stop)
    await stack.enter_async_context(
        server.serving(
            sockets.inspect,
            lambda to: inspect_pb2_grpc.add_InspectServicer_to_server(inspect, to),
            name="inspect",
            daemon=parts.daemon,
            gate=Gate(stage=2),
        )
    )
    stack.callback(inspect.stop)
    parts.daemon.when_handed_over(inspect.stop)
    await stack.enter_async_context(
        server.serving(
            sockets.runtime,
            lambda to: runtime_pb2_grpc.add_RuntimeServicer_to_server(runtime, to),
            name="runtime",
            daemon=parts.daemon,
            gate=Gate(stage=2),
        )
    )


async def _serve_csi_sockets(settings: ProxySettings, parts: _Parts, stack: AsyncExitStack) -> None:
    unpublish = DeferredUnpublish(parts.deferred, parts.events, parts.targets)
    publish = DeferredPublish(
        parts.deferred, parts.handlers, parts.events, parts.targets, unpublish
    )
    for driver in parts.backends:
        name = volumes.DriverName(driver.name)
        front = CsiFrontend(name, driver.backend, parts.deferred, publish, unpublish, parts.targets)
        stack.push_async_callback(front.drain)
        parts.daemon.when_settled(front.idle)
        await stack.enter_async_context(
            server.serving(
                driver.socket,
                name=f"csi {driver.name}",
                lock_path=_lock_path(settings.run_dir, driver.socket),
                generic=[front.handler()],
                daemon=parts.daemon,
                gate=Gate(front.holds),
            )
        )


def _lock_path(run_dir: str, socket: str) -> str:
    """CSI allows no other file beside a plugin's socket, so its lock is in the run directory."""
    return f"{run_dir}/{hashlib.sha256(socket.encode()).hexdigest()[:16]}.lock"
