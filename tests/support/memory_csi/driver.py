"""The driver on a socket, and its host view."""

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import message_factory

from crust.conformance.orchestrator.host_view import HostView
from crust.rpc.messages import extensions
from crust.wire.csi.v1 import csi_pb2
from tests.support.memory_csi.controller import Controller
from tests.support.memory_csi.groups import Groups, Metadata
from tests.support.memory_csi.node import Node
from tests.support.memory_csi.state import Code, Content, Published, Refused, State, check_map_size

Twist = Callable[[str, Any, Any], Any]
"""Method, request, and the answer or the `Refused` that would be given; returns what is given."""

_MEETING_S = 10.0
"""How long a call that races waits for another one, which comes."""

_Service = csi_pb2.PluginCapability.Service
_Expansion = csi_pb2.PluginCapability.VolumeExpansion
PLUGIN = [_Service.CONTROLLER_SERVICE, _Service.VOLUME_ACCESSIBILITY_CONSTRAINTS]
PLUGIN += [_Service.GROUP_CONTROLLER_SERVICE, _Service.SNAPSHOT_METADATA_SERVICE]
DEFERRAL = [20526, 20527, 20528]
NODE_INFO = {"controller": [20529], "node": [20529, 20530]}


class Identity:
    """Identity and every service's capabilities."""

    def __init__(self, profile: str, expansion: Any) -> None:
        self._expansion = expansion
        self.plugin = PLUGIN.copy()
        self.controller = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15]
        self.node = [1, 2, 3, 5, 6]
        if profile == "1.13":
            self.controller += [16, 17]
            self.node += [7, 8]
            self.plugin += [_Service.SNAPSHOT_ACCESSIBILITY_CONSTRAINTS]
        else:
            self.node += [4]

    def GetPluginInfo(self, request: Any) -> Any:
        return csi_pb2.GetPluginInfoResponse(name="memory.csi.crust.dev", vendor_version="1")

    def Probe(self, request: Any) -> Any:
        return csi_pb2.ProbeResponse()

    def GetPluginCapabilities(self, request: Any) -> Any:
        of = csi_pb2.PluginCapability
        wire = [of(service=_Service(type=each)) for each in self.plugin]
        wire.append(of(volume_expansion=_Expansion(type=self._expansion)))
        return csi_pb2.GetPluginCapabilitiesResponse(capabilities=wire)

    def GroupControllerGetCapabilities(self, request: Any) -> Any:
        of = csi_pb2.GroupControllerServiceCapability
        return csi_pb2.GroupControllerGetCapabilitiesResponse(
            capabilities=[of(rpc=of.RPC(type=of.RPC.CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT))]
        )


class MemoryDriver:
    """All services. `faults` and `twist` break rules; `offline` volumes grow only while they are not in use."""

    def __init__(
        self,
        profile: str,
        faults: set[str] | None = None,
        twist: Twist | None = None,
        *,
        offline: bool = False,
    ) -> None:
        self._profile = profile
        self.state = State()
        self.faults = faults or set()
        self.twist: Twist = twist or (lambda _method, _request, answer: answer)
        self.identity = Identity(profile, _Expansion.OFFLINE if offline else _Expansion.ONLINE)
        controller = Controller(self.state, self.faults, offline=offline)
        services = (self.identity, controller, Node(self.state, self.faults), Groups(controller))
        self._services: tuple[object, ...] = (*services, Metadata(controller))
        self.frozen = False
        self.log = Path("/dev/null")
        self._lock = threading.RLock()
        self._racers: dict[str, threading.Event] = {}

    def unary(self, method: str, request: Any, context: grpc.ServicerContext) -> Any:
        if "logs-requests" in self.faults:
            with self._lock, self.log.open("a") as file:
                file.write(f"{method}: {request}\n")
        answer: Any
        try:
            answer = self._joined(method, request, context)
        except Refused as refused:
            answer = refused
        return self._give(self.twist(method, request, answer), context)

    def crash(self) -> None:
        """Die and come back; a correct driver has everything on its disk."""
        with self._lock:
            if "restart-forgets" in self.faults:
                self.state.targets.clear()
                for volume in self.state.volumes.values():
                    volume.staged.clear()
            if "restart-loses-snapshots" in self.faults:
                for snapshot in self.state.snapshots.values():
                    snapshot.content = Content(bytearray())
                    snapshot.wire.size_bytes = 0
            self.frozen = "restart-freezes" in self.faults

    def stream(self, method: str, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        answer: Any
        try:
            with self._lock:
                answer = list(self._find(method)(request))
        except Refused as refused:
            answer = refused
        yield from self._give(self.twist(method, request, answer), context)

    def _find(self, method: str) -> Callable[[Any], Any]:
        if "Health" in method and self._profile == "1.12":
            raise Refused(Code.UNIMPLEMENTED, f"CSI 1.12 has no {method}")
        for service in self._services:
            if found := getattr(service, method, None):
                return found  # type: ignore[no-any-return]
        raise Refused(Code.UNIMPLEMENTED, f"{method} is not served")

    def _joined(self, method: str, request: Any, context: grpc.ServicerContext) -> Any:
        if method == "NodeGetCapabilities":
            return self._node_capabilities(context)
        if method == "ControllerGetCapabilities":
            return self._controller_capabilities(context)
        work = self._find(method)
        if method == "CreateSnapshot" and "snapshots-freeze" in self.faults:
            self.frozen = True
        if f"races-{method}" in self.faults:
            return self._racing(method, work, request)
        with self._lock:
            check_map_size(getattr(request, "secrets", {}))
            return work(request)

    def _racing(self, method: str, work: Callable[[Any], Any], request: Any) -> Any:
        """The classic race: check, then act, without a lock. The first call waits until the second has come."""
        with self._lock:
            first = method not in self._racers
            met = self._racers.setdefault(method, threading.Event())
            over = met.is_set()
        if not first and not over:
            met.set()
            raise Refused(Code.INTERNAL, "another call does this already")
        met.wait(_MEETING_S)
        with self._lock:
            if not met.is_set():
                del self._racers[method]
            return work(request)

    def _controller_capabilities(self, context: grpc.ServicerContext) -> Any:
        types = [*self.identity.controller]
        if extensions.NODE_INFO in self._opted(context):
            types += NODE_INFO["controller"]
        of = csi_pb2.ControllerServiceCapability
        wire = [of(rpc=of.RPC(type=each)) for each in types]  # type: ignore[arg-type]
        return csi_pb2.ControllerGetCapabilitiesResponse(capabilities=wire)

    def _node_capabilities(self, context: grpc.ServicerContext) -> Any:
        opted = self._opted(context)
        types = [*self.identity.node]
        if extensions.DEFERRAL in opted or "defers-to-all" in self.faults:
            types += DEFERRAL
        if extensions.NODE_INFO in opted:
            types += NODE_INFO["node"]
        of = csi_pb2.NodeServiceCapability
        wire = [of(rpc=of.RPC(type=each)) for each in types]  # type: ignore[arg-type]
        return csi_pb2.NodeGetCapabilitiesResponse(capabilities=wire)

    def _opted(self, context: grpc.ServicerContext) -> list[str]:
        said = [str(value) for key, value in context.invocation_metadata() if key == extensions.KEY]
        return ",".join(said).split(",")

    def _give(self, answer: Any, context: grpc.ServicerContext) -> Any:
        if not isinstance(answer, Refused):
            return answer
        if answer.details:
            context.set_trailing_metadata((("grpc-status-details-bin", answer.details),))
        context.abort(answer.code, answer.message)
        raise AssertionError("abort raises")


@contextmanager
def serving(driver: MemoryDriver, socket: Path) -> Iterator[None]:
    """The driver on its socket, while the block runs."""
    pool = futures.ThreadPoolExecutor(16)
    server = grpc.server(pool)
    server.add_generic_rpc_handlers((_Handlers(driver),))
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    if "lock-beside-socket" in driver.faults:
        socket.with_suffix(".lock").touch()
    try:
        yield
    finally:
        server.stop(grace=None).wait()
        pool.shutdown()


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, driver: MemoryDriver) -> None:
        self._driver = driver

    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        _, service, name = details.method.split("/")
        method = csi_pb2.DESCRIPTOR.services_by_name[service.rpartition(".")[2]].methods_by_name[
            name
        ]
        read = message_factory.GetMessageClass(method.input_type).FromString
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(
                lambda request, context: self._driver.stream(name, request, context),
                request_deserializer=read,
                response_serializer=lambda each: each.SerializeToString(),
            )
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: self._driver.unary(name, request, context),
            request_deserializer=read,
            response_serializer=lambda each: each.SerializeToString(),
        )


class MemoryHost(HostView):
    """What a host would show: the driver's own table."""

    def __init__(self, driver: MemoryDriver) -> None:
        self._driver = driver
        self._targets = driver.state.targets
        self._lock = driver._lock

    def _at(self, path: Path) -> Published:
        if path not in self._targets:
            raise FileNotFoundError(str(path))
        return self._targets[path]

    def mounts_at(self, path: Path) -> int:
        return self._targets[path].mounts if path in self._targets else 0

    def mounts_below(self, path: Path) -> list[Path]:
        found = self._targets.items()
        return [each for each, at in found if at.mounts and each.is_relative_to(path)]

    def unmount(self, path: Path) -> None:
        self._targets.pop(path, None)
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)

    def is_block(self, path: Path) -> bool:
        return self._at(path).is_block

    def size_bytes(self, path: Path) -> int:
        at = self._at(path)
        return len(at.volume.content.raw) if path.is_file() else at.volume.content.fs_bytes

    def group_of(self, path: Path) -> int:
        return self._at(path).group

    def write(self, path: Path, data: bytes, *, offset: int = 0) -> None:
        with self._lock:
            at, name = self._split(path)
            if self._driver.frozen:
                raise OSError("the filesystem is frozen")
            if at.readonly:
                raise PermissionError("read-only")
            if name:
                at.volume.content.files[name] = data
                return
            end = offset + len(data)
            if end > len(at.volume.content.raw):
                raise OSError("no space")
            at.volume.content.raw[offset:end] = data

    def read(self, path: Path, size_bytes: int, *, offset: int = 0) -> bytes:
        with self._lock:
            at, name = self._split(path)
            if not name:
                return bytes(at.volume.content.raw[offset : offset + size_bytes])
            if name not in at.volume.content.files:
                raise FileNotFoundError(name)
            return at.volume.content.files[name][offset : offset + size_bytes]

    def _split(self, path: Path) -> tuple[Published, str]:
        if path in self._targets:
            return self._targets[path], ""
        return self._at(path.parent), path.name
