"""The one builder of a node: driver, proxy, shim, a runtime handler and a CO's connections, as parts with names.

Each part starts, ends and starts again alone. A subclass gives the part "driver", or another way to run a part.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import grpc.aio

from crust.core import volumes
from crust.core.settings import OWN_DRIVER
from crust.csi_shim import shim_process
from crust.csi_shim.settings import ShimSettings
from crust.csi_shim.wrap.node_shim import Wrapping
from crust.handoff import store
from crust.handoff.entry import Entry
from crust.handoff.record import Record
from crust.host.block import devices
from crust.host.process.workers import Workers
from crust.proxy import proxy_process
from crust.proxy.settings import KubernetesSettings, ProxySettings, ServedDriver
from crust.rpc import channel
from crust.rpc.messages import crust_v1
from crust.runtime_handler.registration import Registration
from crust.wire.csi.v1 import csi_pb2_grpc
from crust.wire.v1 import inspect_pb2_grpc, runtime_pb2, runtime_pb2_grpc
from tests.support.co import Co
from tests.support.nodes.places import Places
from tests.support.runtimes import fake_handler

PARTS = ("driver", "proxy", "shim", "handler", "calls")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class _Running:
    """A part that runs, and the value that its context manager yielded."""

    ends: AsyncExitStack
    value: Any


@dataclass
class Node:
    """A node; each part that a subclass has nowhere else is in this process."""

    places: Places
    host: proxy_process.Host | None = field(default=None, kw_only=True)
    """Targets, filesystems and devices for the proxy; None: those of the kernel."""
    driver_name: str = field(default=OWN_DRIVER, kw_only=True)
    """The name by which the proxy serves the driver."""
    wrapping: Wrapping | None = field(default=None, kw_only=True)
    """How the shim wraps the driver; None: it does not."""
    grace_s: float = field(default=0, kw_only=True)
    """How long the proxy waits for a runtime handler after its start."""
    defer: str = field(default="", kw_only=True)
    backend: str = field(default="", kw_only=True)
    """The socket that the proxy calls; empty: the shim's."""
    kubernetes: KubernetesSettings | None = field(default=None, kw_only=True)
    parts: tuple[str, ...] = field(default=PARTS, kw_only=True)
    """The parts that a start without names starts, bottom up."""
    threads: Workers | None = field(default=None, kw_only=True)
    """The proxy's pool; None: one of its own."""
    _running: dict[str, _Running] = field(default_factory=dict, init=False)

    async def __aenter__(self) -> Self:
        """Start the node; what has started ends if another part fails."""
        async with AsyncExitStack() as started:
            started.push_async_callback(self.stop)
            await self.start()
            started.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def part(self, name: str) -> AbstractAsyncContextManager[Any]:
        """A part, which serves while the block runs."""
        if name == "proxy":
            settings = self.proxy_settings()
            return proxy_process.running(settings, host=self.host, threads=self.threads)
        if name == "shim":
            return shim_process.serving(self.shim_settings())
        if name == "handler":
            return self.handler()
        assert name == "calls", name
        return self._connected()

    async def enter(self, name: str, context: AbstractAsyncContextManager[Value]) -> Value:
        """Start a part in this way, once the part that has its name has ended; returns what it yields."""
        await self.stop(name)
        ends = AsyncExitStack()
        value = await ends.enter_async_context(context)
        self._running[name] = _Running(ends, value)
        return value

    async def start(self, *names: str) -> None:
        """Start these parts in this order, or those of the node."""
        for name in names or self.parts:
            await self.enter(name, self.part(name))

    async def stop(self, *names: str) -> None:
        """End those of these parts that run, or all that run, the newest first."""
        ended = [name for name in self._running if not names or name in names]
        async with AsyncExitStack() as stack:
            for name in ended:
                stack.push_async_callback(self._running.pop(name).ends.aclose)

    async def restart(self, *names: str) -> None:
        """End these parts or all, and start these or those of the node: they forget what they had in memory."""
        await self.stop(*names)
        await self.start(*names)

    def is_up(self, name: str) -> bool:
        return name in self._running

    def value(self, name: str) -> Any:
        """What a part's context manager yielded; None if the part does not run."""
        return self._running[name].value if name in self._running else None

    def proxy_settings(self) -> ProxySettings:
        served = ServedDriver.model_validate(
            {
                "name": self.driver_name,
                "socket": self.places.csi,
                "backend": self.backend or self.places.shim,
                "defer": self.defer,
            }
        )
        return ProxySettings(
            run_dir=self.places.run,
            volumes_root=self.places.volumes,
            target_roots=(self.places.kubelet,),
            drivers=(served,),
            handler_grace_s=self.grace_s,
            kubernetes=self.kubernetes,
        )

    def shim_settings(self) -> ShimSettings:
        wraps: dict[str, Any] = {"wrap": False}
        if self.wrapping is not None:
            wraps = {
                "kubelet_root": self.wrapping.kubelet_root,
                "driver_name": self.wrapping.driver_name,
            }
        return ShimSettings(
            socket=self.places.shim,
            driver_socket=self.places.driver,
            runtime_socket=self.places.sockets.runtime,
            **wraps,
        )

    def handler(
        self, fake: fake_handler.FakeHandler | None = None, **options: Any
    ) -> AbstractAsyncContextManager[Registration]:
        """A registered handler, as a context manager."""
        options.setdefault("endpoint", self.places.handler)
        proxy_socket = self.places.sockets.handlers
        return fake_handler.running(
            fake or fake_handler.FakeHandler(), proxy_socket=proxy_socket, **options
        )

    def sandbox(self, target: str, name: str = "box-1", handler: str = "kata") -> Any:
        """A sandbox that has the volume, as a context manager: the lock alone where devices are fake."""
        is_real = self.host is None or self.host.devices is devices
        kind = fake_handler.sandbox_with_device if is_real else fake_handler.sandbox
        return kind(self.places.volumes, target, name=name, handler=handler)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[dict[str, grpc.aio.Channel]]:
        sockets = self.places.sockets
        async with (
            channel.connect(self.places.csi) as csi,
            channel.connect(sockets.runtime) as runtime,
            channel.connect(sockets.inspect) as inspect,
        ):
            yield {"csi": csi, "runtime": runtime, "inspect": inspect}

    @property
    def co(self) -> Co:
        """The calls of the proxy's socket."""
        return Co(self.value("calls")["csi"])

    @property
    def node(self) -> "csi_pb2_grpc.NodeAsyncStub":
        """The Node service, as a kubelet calls it."""
        return self.co.node

    @property
    def controller(self) -> "csi_pb2_grpc.ControllerAsyncStub":
        return self.co.controller

    @property
    def runtime(self) -> "runtime_pb2_grpc.RuntimeAsyncStub":
        connected: grpc.aio.Channel = self.value("calls")["runtime"]
        return runtime_pb2_grpc.RuntimeStub(connected)

    @property
    def inspect(self) -> "inspect_pb2_grpc.InspectAsyncStub":
        connected: grpc.aio.Channel = self.value("calls")["inspect"]
        return inspect_pb2_grpc.InspectStub(connected)

    def entry(self, target: str) -> Entry | None:
        return store.Store(self.places.volumes).read(volumes.TargetPath(target))

    def record(self, target: str) -> Record:
        """The record of a target, which has one."""
        entry = self.entry(target)
        assert entry is not None
        return entry.require()

    def freeze(self, target: str, thaw_after_s: int = 10) -> Any:
        """RuntimeFreezeVolume."""
        request = runtime_pb2.RuntimeFreezeVolumeRequest(
            volume_target_path=target, thaw_after_seconds=thaw_after_s
        )
        return self.runtime.RuntimeFreezeVolume(request, timeout=10)

    def thaw(self, target: str) -> Any:
        """RuntimeThawVolume."""
        request = runtime_pb2.RuntimeThawVolumeRequest(volume_target_path=target)
        return self.runtime.RuntimeThawVolume(request, timeout=10)

    def limit(self, target: str, limits: volumes.IoLimits) -> Any:
        """RuntimeSetVolumeLimits."""
        request = runtime_pb2.RuntimeSetVolumeLimitsRequest(
            volume_target_path=target, limits=crust_v1.io_limits_to_wire(limits)
        )
        return self.runtime.RuntimeSetVolumeLimits(request, timeout=10)
