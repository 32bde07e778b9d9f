"""The shim as a process, in front of a driver's socket. The driver does not change.

Calls without the flag pass through as bytes. A status of the driver reaches the caller unchanged.
"""

import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from google.protobuf.message import Message

from crust.core import deferral_keys, errors, metrics
from crust.core.settings.shim import ShimSettings
from crust.csi_shim import version
from crust.csi_shim.deferral import Deferral
from crust.csi_shim.runtime_client import RuntimeClient
from crust.csi_shim.wrap import private_directories
from crust.csi_shim.wrap.frontend import Frontend, Wrapping
from crust.csi_shim.wrap.inner import InnerNode
from crust.csi_shim.wrap.staging import Staging
from crust.csi_shim.wrap.volume_operations import VolumeOperations
from crust.csi_shim.wrap.wrapped import WrappedVolumes
from crust.host.mounts import propagation
from crust.host.process import oserrors, workers
from crust.host.process.workers import Workers
from crust.rpc.call import Call
from crust.rpc.driver_facts import DriverFacts
from crust.rpc.messages import extensions
from crust.rpc.port import Port, stub
from crust.rpc.ports import SOCKETS, Ports
from crust.rpc.serving.daemon import Daemon, starting
from crust.rpc.serving.service import Methods, Service, Unary, parsed
from crust.rpc.serving.worker_watch import WorkerWatch
from crust.rpc.status import Metadata
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

_NODE = "/csi.v1.Node/"
Flagged = TypeVar(
    "Flagged",
    csi_pb2.NodePublishVolumeRequest,
    csi_pb2.NodeGetVolumeStatsRequest,
    csi_pb2.NodeExpandVolumeRequest,
)


class _Socket:
    """Adapts a driver's socket to `deferral.InnerNode`."""

    def __init__(self, driver: Port, facts: DriverFacts) -> None:
        self._stub = stub(csi_pb2_grpc.NodeStub, driver)
        self._facts = facts

    async def publish(
        self, request: csi_pb2.NodePublishVolumeRequest, call: Call
    ) -> csi_pb2.NodePublishVolumeResponse:
        return await self._stub.NodePublishVolume(
            request, metadata=_metadata(call), timeout=call.time_remaining()
        )

    async def unpublish(
        self, request: csi_pb2.NodeUnpublishVolumeRequest, call: Call, timeout_s: float
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        return await self._stub.NodeUnpublishVolume(
            request, metadata=_metadata(call), timeout=timeout_s
        )

    async def expand(
        self, request: csi_pb2.NodeExpandVolumeRequest, call: Call
    ) -> csi_pb2.NodeExpandVolumeResponse:
        return await self._stub.NodeExpandVolume(
            request, metadata=_metadata(call), timeout=call.time_remaining()
        )

    async def defers(self, call: Call) -> bool:
        return await self._facts.defers(call.time_remaining())


def methods(driver: Port, deferral: Deferral) -> Methods:
    """The shim's methods: the three that may be flagged, and Probe; all others pass."""

    def flagged(
        name: str, kind: type[Flagged], answer: Callable[[Flagged, Call], Awaitable[Message]]
    ) -> tuple[str, Unary]:
        async def answered(request: Flagged, data: bytes, call: Call) -> bytes:
            if not request.defer_fs_ops:
                return await driver.forward(call, data)
            return (await answer(request, call)).SerializeToString()

        return _NODE + name, parsed(kind, answered)

    async def stats(request: csi_pb2.NodeGetVolumeStatsRequest, _: Call) -> Message:
        return await deferral.stats(request)

    own = dict(
        (
            flagged("NodePublishVolume", csi_pb2.NodePublishVolumeRequest, deferral.publish),
            flagged("NodeGetVolumeStats", csi_pb2.NodeGetVolumeStatsRequest, stats),
            flagged("NodeExpandVolume", csi_pb2.NodeExpandVolumeRequest, deferral.expand),
        )
    )
    return Methods({**own, version.PROBE: version.telling(driver)})


@asynccontextmanager
async def serving(
    *,
    socket_path: str,
    driver_socket: str,
    runtime_socket: str,
    report_condition: bool,
    wrapping: Wrapping | None = None,
    threads: Workers | None = None,
) -> AsyncIterator[Daemon]:
    """Serve the shim while the block runs. Raises what `server.serving` raises, before anything is served.

    Without `wrapping` only a driver that defers by itself can defer.
    """
    directory = os.path.dirname(socket_path)
    with oserrors.translating(f"cannot make the directory {directory}"):
        await workers.run(os.makedirs, directory, 0o700, exist_ok=True)
    async with (
        starting(f"{socket_path}.lock") as daemon,
        part(
            daemon,
            socket_path=socket_path,
            driver_socket=driver_socket,
            runtime_socket=runtime_socket,
            report_condition=report_condition,
            wrapping=wrapping,
            threads=threads,
        ),
        daemon.serves(),
    ):
        yield daemon


@asynccontextmanager
async def part(  # noqa: PLR0913 - one per setting
    daemon: Daemon,
    *,
    socket_path: str,
    driver_socket: str,
    runtime_socket: str,
    report_condition: bool,
    wrapping: Wrapping | None = None,
    ports: Ports = SOCKETS,
    threads: Workers | None = None,
) -> AsyncIterator[None]:
    """Serve as a part of the process `daemon` while the block runs."""
    async with (
        ports.connect(driver_socket) as driver,
        ports.connect(runtime_socket) as back,
        contextlib.aclosing(DriverFacts(driver)) as facts,
        contextlib.AsyncExitStack() as stack,
    ):
        runtime = RuntimeClient(back)
        deferral = Deferral(_Socket(driver, facts), runtime, report_condition=report_condition)
        own = methods(driver, deferral)
        if wrapping is not None:
            threads = threads or Workers(f"the shim at {socket_path}", limit=64)
            watch = WorkerWatch(threads, daemon.health)
            await stack.enter_async_context(watch.running())  # ends when all operations have ended
            work = VolumeOperations(wrapping.kubelet_root, threads)
            watch.operations.append(lambda: [work.operations])
            stack.push_async_callback(work.operations.drain)
            wrapped = _wrapped(driver, runtime)
            frontend = Frontend(driver, facts, deferral, wrapped, wrapping, work)
            own = frontend.methods()
            metrics.export_workers(f"shim {socket_path}", lambda: threads.load)
        service = Service("shim", own, others=driver, health=daemon.health, driver=facts.known_name)
        serves = ports.serving(socket_path, service, lock_path=None)
        daemon.readiness.append(lambda: _not_connected(driver, driver_socket))
        with threads.used() if threads is not None else contextlib.nullcontext():
            await stack.enter_async_context(serves)
        yield


def _not_connected(driver: Port, socket_path: str) -> errors.CrustError | None:
    return (
        None
        if driver.is_connected()
        else errors.PeerUnavailable.named(
            "DriverNotConnected",
            "the driver cannot be reached",
            why=f"there is no connection to {socket_path}",
            hint="start the driver, and look at its log",
        )
    )


def _wrapped(driver: Port, runtime: RuntimeClient) -> WrappedVolumes:
    inner = InnerNode(driver)
    return WrappedVolumes(inner, Staging(inner), runtime)


async def run(settings: ShimSettings) -> None:
    """Serve the shim until cancelled; raises as `serving` does, and `MountsNotSeen`."""
    if settings.controller:
        from crust.csi_shim.controller import (
            process as controller_process,  # a node need not load it
        )

        await controller_process.run(settings)
        return
    await check(settings)
    async with serving(
        socket_path=settings.socket,
        driver_socket=settings.driver_socket,
        runtime_socket=settings.runtime_socket,
        report_condition=settings.csi_profile == "1.12",
        wrapping=wrapping_of(settings),
    ) as daemon:
        await daemon.forever()


async def check(settings: ShimSettings) -> None:
    """Raise `MountsNotSeen` where a wrapped driver's mounts would not be seen."""
    if settings.wrap and settings.check_propagation:
        directory = private_directories.root(settings.kubelet_root)
        await workers.run(propagation.check_seen, directory)


def wrapping_of(settings: ShimSettings) -> Wrapping | None:
    """How a driver that does not defer is wrapped; None: it is not."""
    if not settings.wrap:
        return None
    default = deferral_keys.Defer(settings.defer)
    return Wrapping(settings.kubelet_root, default, settings.driver_name)


def _metadata(call: Call) -> Metadata:
    own = dict(extensions.METADATA)
    kept = tuple(pair for pair in call.invocation_metadata() if pair[0] not in own)
    return (*kept, *extensions.METADATA)
