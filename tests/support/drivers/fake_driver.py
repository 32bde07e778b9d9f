"""The fake CSI driver: every service over a real socket, and a test decides what goes wrong.

It keeps CSI's rules in the version that it is given, with volumes that its controller has made. The conformance suite
runs on such a one, as on the real drivers. Without a version it has any volume that it is asked for, on devices that
nobody opens, and serves Identity and Node alone: for tests of what stands in front of a driver.

What can go wrong: `faults` are names of broken rules, which the services check; `failing`, `failures`,
`failures_after` are answers that are not OK, by method; `gates` and `hangs` stop calls; `alter` changes a deferred
mount, and `twist` sees every request and its answer, and may replace the answer.
"""

import asyncio
import json
import os
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf import message_factory

from crust.core import volumes
from crust.host.block import devices
from crust.rpc.messages import extensions
from crust.wire.csi.v1 import csi_pb2
from tests.support.memory_csi.controller import Controller
from tests.support.memory_csi.groups import Groups, Metadata
from tests.support.memory_csi.node import Mounts, Node, StrictNode
from tests.support.memory_csi.state import MIB as MIB
from tests.support.memory_csi.state import Code as Code
from tests.support.memory_csi.state import Content, State, check_map_size
from tests.support.memory_csi.state import Failure as Failure

Context = grpc.aio.ServicerContext[Any, Any]
Rpc = csi_pb2.NodeServiceCapability.RPC
Twist = Callable[[str, Any, Any], Any]
"""Method, request, and the answer or the `Failure` that would be given; returns what is given."""

_MEETING_S = 10.0
"""How long a call that races waits for another one, which comes."""

_Service = csi_pb2.PluginCapability.Service
_Expansion = csi_pb2.PluginCapability.VolumeExpansion
PLUGIN = [_Service.CONTROLLER_SERVICE, _Service.VOLUME_ACCESSIBILITY_CONSTRAINTS]
PLUGIN += [_Service.GROUP_CONTROLLER_SERVICE, _Service.SNAPSHOT_METADATA_SERVICE]
DEFERRAL = [Rpc.DEFER_FS_OPS, Rpc.DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP]
NODE_INFO = {"controller": [20529], "node": [20529, 20530]}


@dataclass(frozen=True)
class Call:
    """One call as the driver saw it."""

    method: str
    request: Any
    metadata: tuple[tuple[str, str | bytes], ...]
    time_left_s: float | None


@dataclass
class Gate:
    """Where a call stops until it may go on."""

    entered: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def stop(self) -> None:
        """Stop a call here."""
        self.entered.set()
        try:
            await self.opened.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


class FakeDriver:
    """All services. `offline` volumes grow only while they are not in use."""

    def __init__(
        self,
        profile: str = "",
        faults: set[str] | None = None,
        twist: Twist = lambda _method, _request, answer: answer,
        *,
        defers: bool = True,
        offline: bool = False,
        mounts: Mounts | None = None,
        device: str = "",
        sizes_file: str = "",
    ) -> None:
        self.profile = profile
        self.faults = faults or set()
        self.twist = twist
        self.defers = defers
        """Whether it advertises deferral."""
        self.mounts_instead = False
        """It does not know the flag, and mounts on the host."""
        self.name = "csi.example.com"
        self.ready = True
        self.state = State()
        self.published = self.state.targets
        self.calls: list[Call] = []
        """Those of the Node service."""
        self.failures: dict[str, Failure] = {}
        self.failures_after: dict[str, Failure] = {}
        """As `failures`, after the work."""
        self.failing: dict[str, Failure] = {}
        """As `failures`, for every call until a test removes it."""
        self.after: dict[str, Callable[[], None]] = {}
        """What happens when the work of a method is done."""
        self.gates: dict[str, Gate] = {}
        """Where calls stop after their work."""
        self.hangs: asyncio.Event | None = None
        """Calls are accepted, and go on when this event is set."""
        self.alter: Callable[[csi_pb2.DeferredMount], None] = lambda _: None
        self.identities: dict[str, tuple[int, int, int]] = {}
        self.io_limits = volumes.IoLimits()
        self.format: volumes.GuestFormat | None = None
        self.passphrase = ""
        self.device = device
        """A device of this host that every volume is."""
        self._sizes_file = sizes_file
        """JSON with the sizes of devices, written at each expansion for other processes."""
        if sizes_file:
            self.after["NodeExpandVolume"] = self._write_sizes
        self.log = Path("/dev/null")
        self.frozen = False
        self.lock = threading.RLock()
        """Held while a call works: a test may look from another thread."""
        self._racers: dict[str, asyncio.Event] = {}
        self._advertise(profile, offline=offline)
        node = Node(self.state, self._describe, mounts or Mounts())
        self._services: tuple[object, ...] = (self, node)
        self.node = node
        if profile:
            self.name = "memory.csi.crust.dev"
            controller = Controller(self.state, self.faults, offline=offline)
            strict = StrictNode(self.state, self._describe, self.faults)
            self.node = strict
            self._services = (self, controller, strict, Groups(controller), Metadata(controller))

    def _advertise(self, profile: str, *, offline: bool) -> None:
        """What it advertises: a test may change each of the lists."""
        self.plugin: list[Any] = []
        self.expansion: list[Any] = []
        """How its volumes can be expanded, as a plugin says it."""
        self.controller_rpcs: list[int] = []
        self.node_rpcs: list[int] = [Rpc.STAGE_UNSTAGE_VOLUME, Rpc.EXPAND_VOLUME]
        self.deferral: list[int] = [*DEFERRAL]
        self.node_info = bool(profile)
        if not profile:
            return
        self.plugin = PLUGIN.copy()
        self.expansion = [_Expansion.OFFLINE if offline else _Expansion.ONLINE]
        self.controller_rpcs = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15]
        self.node_rpcs = [1, 2, 3, 5, 6]
        self.deferral += [Rpc.DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP_CHANGE_POLICY]
        if profile == "1.13":
            self.controller_rpcs += [16, 17]
            self.node_rpcs += [7, 8]
            self.plugin += [_Service.SNAPSHOT_ACCESSIBILITY_CONSTRAINTS]
            self.state.places_snapshots = True
        else:
            self.node_rpcs += [4]
            self.controller_rpcs += [11]

    def called(self, method: str) -> list[Call]:
        return [call for call in self.calls if call.method == method]

    def crash(self) -> None:
        """Die and come back; a correct driver has everything on its disk."""
        with self.lock:
            if "restart-forgets" in self.faults:
                self.state.targets.clear()
                for volume in self.state.volumes.values():
                    volume.staged.clear()
            if "restart-loses-snapshots" in self.faults:
                for snapshot in self.state.snapshots.values():
                    snapshot.content = Content(bytearray())
                    snapshot.wire.size_bytes = 0
            self.frozen = "restart-freezes" in self.faults

    def GetPluginInfo(self, request: Any) -> Any:
        return csi_pb2.GetPluginInfoResponse(name=self.name, vendor_version="1")

    def Probe(self, request: Any) -> Any:
        answer = csi_pb2.ProbeResponse()
        answer.ready.value = self.ready
        return answer

    def GetPluginCapabilities(self, request: Any) -> Any:
        of = csi_pb2.PluginCapability
        wire = [of(service=_Service(type=kind)) for kind in self.plugin]
        wire += [of(volume_expansion=_Expansion(type=kind)) for kind in self.expansion]
        return csi_pb2.GetPluginCapabilitiesResponse(capabilities=wire)

    def GroupControllerGetCapabilities(self, request: Any) -> Any:
        of = csi_pb2.GroupControllerServiceCapability
        types = [of.RPC.CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT]
        return csi_pb2.GroupControllerGetCapabilitiesResponse(capabilities=_rpcs(of, types))

    async def answer(self, method: str, request: Any, context: Context) -> Any:
        """The answer to a call; raises `Failure`."""
        if self.hangs is not None:
            await self.hangs.wait()
        if method.startswith("Node"):
            metadata = tuple((key, value) for key, value in context.invocation_metadata() or ())
            self.calls.append(Call(method, request, metadata, context.time_remaining()))
        _raise(self.failing.get(method) or self.failures.pop(method, None))
        self._log_request(method, request)
        answer = await self._worked(method, request, context)
        self.after.get(method, lambda: None)()
        if gate := self.gates.get(method):
            await gate.stop()
        _raise(self.failures_after.pop(method, None))
        return answer

    async def refuse(self, failure: Failure, context: Context) -> None:
        await context.abort(failure.code, failure.details, failure.trailing)

    def _log_request(self, method: str, request: Any) -> None:
        if "logs-requests" in self.faults:
            with self.lock, self.log.open("a") as file:
                file.write(f"{method}: {request}\n")

    async def _worked(self, method: str, request: Any, context: Context) -> Any:
        if method in ("NodeGetCapabilities", "ControllerGetCapabilities"):
            return self._capabilities(method, context)
        if method == "NodePublishVolume" and self.mounts_instead:
            request = type(request).FromString(request.SerializeToString())
            request.ClearField("defer_fs_ops")
        work = self.find(method)
        if method == "CreateSnapshot" and "snapshots-freeze" in self.faults:
            self.frozen = True
        if f"races-{method}" in self.faults:
            return await self._racing(method, work, request)
        with self.lock:
            check_map_size(getattr(request, "secrets", {}) if self.profile else {})
            answer = work(request)
            return list(answer) if isinstance(answer, Iterator) else answer

    def find(self, method: str) -> Callable[[Any], Any]:
        """What does the work of a method."""
        if "Health" in method and self.profile == "1.12":
            raise Failure(Code.UNIMPLEMENTED, f"CSI 1.12 has no {method}")
        for service in self._services:
            if work := getattr(service, method, None):
                return work  # type: ignore[no-any-return]
        raise Failure(Code.UNIMPLEMENTED, f"{method} is not served")

    async def _racing(self, method: str, work: Callable[[Any], Any], request: Any) -> Any:
        """The classic race: check, then act, without a lock. The first call waits until the second has come."""
        first = method not in self._racers
        met = self._racers.setdefault(method, asyncio.Event())
        if not first and not met.is_set():
            met.set()
            raise Failure(Code.INTERNAL, "another call does this already")
        try:
            await asyncio.wait_for(met.wait(), _MEETING_S)
        except TimeoutError:
            del self._racers[method]
        return work(request)

    def _capabilities(self, method: str, context: Context) -> Any:
        knows_info = self.node_info and extensions.requested(
            context.invocation_metadata(), extensions.NODE_INFO
        )
        if method == "ControllerGetCapabilities":
            types = self.controller_rpcs + (NODE_INFO["controller"] if knows_info else [])
            wire = _rpcs(csi_pb2.ControllerServiceCapability, types)
            return csi_pb2.ControllerGetCapabilitiesResponse(capabilities=wire)
        defers = self.defers and extensions.requested(
            context.invocation_metadata(), extensions.DEFERRAL
        )
        types = self.node_rpcs + (NODE_INFO["node"] if knows_info else [])
        types += self.deferral if defers or "defers-to-all" in self.faults else []
        wire = _rpcs(csi_pb2.NodeServiceCapability, types)
        return csi_pb2.NodeGetCapabilitiesResponse(capabilities=wire)

    def _describe(self, request: csi_pb2.NodePublishVolumeRequest) -> csi_pb2.DeferredMount:
        """What it answers to a deferred publish."""
        answer = self.deferred_mount(request)
        self.alter(answer)
        return answer

    def deferred_mount(self, request: csi_pb2.NodePublishVolumeRequest) -> csi_pb2.DeferredMount:
        """What an honest driver answers."""
        mount, of = request.volume_capability.mount, csi_pb2.DeferredMount
        device = self.device or device_of(request.volume_id)
        known = self.identities.get(request.volume_id) or identity_of(device)
        if self.device:
            known = astuple(devices.identify(device))
        identity = of.DeviceIdentity(major=known[0], minor=known[1], disk_sequence=known[2])
        answer = csi_pb2.DeferredMount(
            block_device=of.BlockDevice(path=device, identity=identity),
            fs_type=mount.fs_type or "ext4",
            mount_options=mount.mount_flags,
            supplemental_group=mount.volume_supplemental_group,
            supplemental_group_change_policy=mount.volume_supplemental_group_change_policy,
            readonly=request.readonly,
            capacity_bytes=self.node.find(request.volume_id).wire.capacity_bytes,
            content_generation=1,
        )
        if self.io_limits != volumes.IoLimits():
            answer.io_limits.CopyFrom(csi_pb2.DeferredMount.IoLimits(**asdict(self.io_limits)))
        if self.format is not None:
            answer.format.SetInParent()
            answer.format.ext4_bytes_per_inode = self.format.ext4_bytes_per_inode or 0
            if self.format.ext4_reserved_percent is not None:
                answer.format.ext4_reserved_percent = self.format.ext4_reserved_percent
        if self.passphrase:
            answer.encryption = "luks"
            answer.secrets["passphrase"] = self.passphrase
        return answer

    def _write_sizes(self) -> None:
        known = {
            device_of(key): volume.wire.capacity_bytes for key, volume in self.state.volumes.items()
        }
        Path(f"{self._sizes_file}.new").write_text(json.dumps(known), encoding="utf-8")
        os.rename(f"{self._sizes_file}.new", self._sizes_file)


def _rpcs(of: Any, types: Iterable[int]) -> list[Any]:
    return [of(rpc=of.RPC(type=kind)) for kind in types]


def _raise(failure: Failure | None) -> None:
    if failure is not None:
        raise failure


def device_of(volume_id: str) -> str:
    """The device of a volume; nobody opens it."""
    return f"/dev/fake-{volume_id}"


def identity_of(device: str) -> tuple[int, int, int]:
    """Its major, minor and sequence, the same in every process."""
    number = zlib.crc32(device.encode())
    return 7, number % 2**20, 100 + number % 997


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        _, service, name = handler_call_details.method.replace("csi.v1.", "").split("/")
        if not self._driver.profile and service not in ("Identity", "Node"):
            return None
        method = csi_pb2.DESCRIPTOR.services_by_name[service].methods_by_name.get(name)
        if method is None:
            return None

        async def answer(request: Any, context: Context) -> Any:
            return await self._answered(name, request, context)

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            for message in await self._answered(name, request, context):
                yield message

        read = message_factory.GetMessageClass(method.input_type).FromString
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(stream, read, _written)
        return grpc.unary_unary_rpc_method_handler(answer, read, _written)

    async def _answered(self, name: str, request: Any, context: Context) -> Any:
        answer: Any
        try:
            answer = await self._driver.answer(name, request, context)
        except Failure as failure:
            answer = failure
        answer = self._driver.twist(name, request, answer)
        if isinstance(answer, Failure):
            await self._driver.refuse(answer, context)
        return answer


def _written(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


@asynccontextmanager
async def serving(driver: FakeDriver, socket: str) -> AsyncIterator[None]:
    """The driver on its socket, while the block runs."""
    server = grpc.aio.server(handlers=[_Handlers(driver)])
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    if "lock-beside-socket" in driver.faults:
        Path(socket).with_suffix(".lock").touch()
    try:
        yield
    finally:
        await server.stop(grace=None)
