"""A test kit for authors of runtimes: a proxy without daemons, in front of a real handoff directory.

    async with testing.serving(directory) as proxy:
        runtime = await proxy.registered("box")         # a runtime registers at proxy.socket
        proxy.publish(device, target, handler="box")    # an entry, as the proxy writes it
        ...                                             # the runtime starts a sandbox with `target`
        stats = await runtime.stub.GetVolumeStats(...)  # the calls that the proxy makes
        proxy.unpublish(target)                         # refused while a sandbox has the volume

The proxy's own code writes the entries. The registry is a fake: crust's tests run the same contract against it and
against the proxy's. The fake makes none of a proxy's decisions: policy, reservations of devices, features that a
publish needs. A test may publish a volume that the runtime must refuse.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import crust
from crust.core import errors, volumes
from crust.handoff import claims, layout
from crust.handoff.record import Record
from crust.handoff.store import Store
from crust.host.block import devices
from crust.host.mounts import mount_api
from crust.host.process import workers
from crust.rpc.call import Call
from crust.rpc.messages import crust_v1
from crust.rpc.messages.crust_v1 import HandlerNameTaken, InvalidRegistration
from crust.rpc.port import SocketPort, stub
from crust.rpc.serving import server
from crust.rpc.serving.service import Service, methods_of
from crust.wire.v1 import handlers_pb2, handlers_pb2_grpc

__all__ = ["FakeProxy", "Runtime", "serving"]

_SERVICE = handlers_pb2.DESCRIPTOR.services_by_name["HandlerRegistry"]


@dataclass(frozen=True, slots=True)
class Runtime:
    """A registered runtime: its request, and a stub that calls it."""

    request: handlers_pb2.RegisterRequest
    stub: "handlers_pb2_grpc.RuntimeHandlerAsyncStub"

    @property
    def features(self) -> frozenset[volumes.HandlerFeature]:
        """The features that it offers and that this version knows."""
        return frozenset(crust_v1.registration(self.request).features)


@dataclass
class FakeProxy:
    """Entries, the registry, and secrets. `root` is the handoff directory, `socket` the registry's socket."""

    root: str
    socket: str
    secrets: dict[str, Mapping[str, str]] = field(default_factory=dict)
    """The answers of GetVolumeSecrets for claimed volumes, by target path."""

    def __post_init__(self) -> None:
        self.store = Store(self.root)
        self.runtimes: dict[str, Runtime] = {}
        self.changed = asyncio.Condition()
        self.stopping = asyncio.Event()

    async def registered(self, name: str, timeout_s: float = 60) -> Runtime:
        """Wait until the runtime is registered; raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(lambda: name in self.runtimes)
            return self.runtimes[name]

    async def lost(self, name: str, timeout_s: float = 60) -> None:
        """Wait until the runtime's session has ended; raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(lambda: name not in self.runtimes)

    def publish(
        self, device: str, target: str, *, handler: str, guard: bool = False, **mount: Any
    ) -> Record:
        """Publish the device at the target; `mount` are fields of `volumes.DeferredMount`, e.g. readonly=True.

        With `guard` the target gets its guard mount, which needs root; `unpublish` removes it. It takes names if the
        runtime is registered with SUB_PATH, as the proxy's does (H-39).
        """
        where = volumes.TargetPath.parse(target)
        fields: dict[str, Any] = {
            "source": volumes.BlockSource(device, devices.identify(device)),
            "fs_type": "ext4",
            "capacity_bytes": devices.size_bytes(device),
            **mount,
        }
        key = volumes.VolumeKey(
            volumes.DriverName("testing.crust.dev"), volumes.VolumeId(f"vol-{where.digest[:12]}")
        )
        deferred = volumes.DeferredMount(**fields)
        record = Record.of(deferred, key, where, volumes.HandlerName(handler))
        if guard:
            runtime = self.runtimes.get(handler)
            features = runtime.features if runtime is not None else frozenset()
            mount_api.mount_guard(where.text, names=volumes.HandlerFeature.SUB_PATH in features)
        self.store.write(record)
        return record

    def unpublish(self, target: str, *, guard: bool = False) -> None:
        """Remove the entry; raises `claims.HeldBySandbox` while a sandbox has the volume."""
        where = volumes.TargetPath.parse(target)
        with self.store.begin_removal(where) as begun:
            begun.complete((lambda: mount_api.unmount(where.text)) if guard else None)

    def paths(self, target: str) -> layout.EntryPaths:
        """The files of the target's entry."""
        return layout.Layout(self.root).entry(volumes.TargetPath.parse(target))

    def claim(self, target: str) -> claims.Claim | None:
        """The claim on the target's volume, live or dead."""
        return claims.read(self.paths(target))


class _Registry:
    def __init__(self, proxy: FakeProxy) -> None:
        self._proxy = proxy

    async def Register(
        self, request: handlers_pb2.RegisterRequest, call: Call
    ) -> AsyncIterator[handlers_pb2.RegisterResponse]:
        crust_v1.registration(request)
        if holder := self._proxy.runtimes.get(request.name):
            raise HandlerNameTaken(request.name, holder.request.endpoint)
        try:
            to_runtime = SocketPort(request.endpoint)
        except errors.InvalidRequest as error:
            raise InvalidRegistration(str(error)) from error
        async with to_runtime as port:
            calls = stub(handlers_pb2_grpc.RuntimeHandlerStub, port)
            self._proxy.runtimes[request.name] = Runtime(request, calls)
            try:
                await self._tell()
                yield handlers_pb2.RegisterResponse(
                    volumes_directory=self._proxy.root, proxy_version=crust.__version__
                )
                await self._proxy.stopping.wait()
            finally:
                del self._proxy.runtimes[request.name]
                await self._tell()

    async def GetVolumeSecrets(
        self,
        request: handlers_pb2.GetVolumeSecretsRequest,
        call: Call,
    ) -> handlers_pb2.GetVolumeSecretsResponse:
        target = volumes.TargetPath.parse(request.target_path)
        entry = await workers.run(self._proxy.store.read, target)
        if entry is None:
            raise claims.NotPublished(target)
        claim = entry.claim
        if not entry.live or claim is None or claim.handler != request.handler:
            raise errors.NotReady(
                f"no secrets are given for {target}", why=f"{request.handler} has not claimed it"
            )
        secrets = self._proxy.secrets.get(target.text, {})
        return handlers_pb2.GetVolumeSecretsResponse(secrets=secrets)

    async def _tell(self) -> None:
        async with self._proxy.changed:
            self._proxy.changed.notify_all()


@contextlib.asynccontextmanager
async def serving(directory: str) -> AsyncIterator[FakeProxy]:
    """A proxy below `directory`: `volumes/` is the handoff directory, `handlers.sock` the registry's socket.

    The directory's path must be short: a socket's has at most 107 bytes.
    """
    proxy = FakeProxy(f"{directory}/volumes", f"{directory}/handlers.sock")
    await workers.run(proxy.store.open)

    service = Service("fake-proxy", methods_of(_Registry(proxy), _SERVICE))
    async with server.serving(proxy.socket, service):
        try:
            yield proxy
        finally:
            proxy.stopping.set()
