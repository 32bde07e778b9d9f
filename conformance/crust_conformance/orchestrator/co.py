"""The CO of a case: it creates, attaches, stages and publishes volumes, and undoes all of it.

`undo` sees every call, so that all steps of a case are undone, even if the case fails half-way.
"""

import errno
import itertools
import secrets as tokens
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from google.protobuf.message import Message

from crust.rpc.messages import extensions
from crust.wire.csi.v1 import csi_pb2
from crust.wire.csi.v1.csi_pb2 import Volume, VolumeCapability
from crust_conformance.catalogue import Case, Clause, Strength
from crust_conformance.options import Options
from crust_conformance.orchestrator.calls import Calls, Channels, Code, Refusal
from crust_conformance.orchestrator.capabilities import BLOCK, PUBLISH, STAGE
from crust_conformance.orchestrator.host_view import HostView
from crust_conformance.orchestrator.undo import CaseCleanup
from crust_conformance.orchestrator.volume_capabilities import block, mount
from crust_conformance.results import Finding, explained

R = TypeVar("R", bound=Message)
_numbers = itertools.count(1)
_FILE_MAX_BYTES = 1 << 20
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
"""Of a filesystem, of the open of a device, of a write to it."""
SIDECAR_KEYS = {
    "csi.storage.k8s.io/pvc/name": "data",
    "csi.storage.k8s.io/pvc/namespace": "default",
    "csi.storage.k8s.io/pv/name": "pvc-1",
}
"""Parameters that sidecars add to the parameters of the StorageClass."""


class Co(Calls):
    """One case's CO. Clean it in the end; `findings` are the broken weaker clauses."""

    def __init__(
        self, channels: Channels, options: Options, has: frozenset[str], host: HostView, case: Case
    ) -> None:
        self.options = options
        self.has = has
        self.host = host
        self.root = options.target_root / f"crust-conformance-{tokens.token_hex(4)}"
        self.findings: list[Finding] = []
        self._case = case
        self._cleanup = CaseCleanup(host, self.root)
        intercepted = (grpc.intercept_channel(channel, self._cleanup) for channel in channels)
        super().__init__(Channels(*intercepted), options.timeout_s, options.parameters.secrets)
        self._attached: dict[str, dict[str, str]] = {}

    def clean(self) -> list[Finding]:
        """Undo the steps of the case; returns a finding for each object that could not be removed."""
        return self._cleanup.clean(self)

    def should(self) -> "_Weaker":
        """An assertion that fails in its block breaks the case's SHOULD; the case continues."""
        return _Weaker(self, self._case.clause(Strength.SHOULD))

    def beyond(self) -> "_Weaker":
        """An assertion that fails in its block is noted; the case continues."""
        return _Weaker(self, self._case.clause(Strength.BEYOND))

    # Names are new in every run, so that volumes of an earlier run are never found.
    def name(self, stem: str = "volume") -> str:
        """A name that no volume has."""
        return f"{stem}-{tokens.token_hex(4)}-{next(_numbers)}"

    @property
    def mount(self) -> VolumeCapability:
        """The capability for cases in which the filesystem does not matter."""
        return mount(self.options.parameters.fs_types[0])

    @property
    def kinds(self) -> list[VolumeCapability]:
        """Every access type that the driver takes."""
        return [self.mount, block()] if BLOCK in self.has else [self.mount]

    @property
    def filesystems(self) -> list[VolumeCapability]:
        """Every filesystem that the driver makes."""
        return [mount(fs_type) for fs_type in self.options.parameters.fs_types]

    def request(
        self, kind: type[R], volume: Volume, capability: VolumeCapability | None = None, **keys: Any
    ) -> R:
        """A request that a driver must accept: with the volume's values in a CO, and the fields `keys`."""
        values = {
            "volume_id": volume.volume_id,
            "volume_context": volume.volume_context,
            "publish_context": self._attached.get(volume.volume_id, {}),
            "volume_capability": capability or self.mount,
            "staging_target_path": str(self.staging(volume)) if STAGE in self.has else "",
        }
        has = kind.DESCRIPTOR.fields_by_name
        return kind(**{name: value for name, value in values.items() if name in has}, **keys)

    def create_request(
        self,
        capability: VolumeCapability | None = None,
        *,
        name: str = "",
        size_bytes: int = 0,
        source: csi_pb2.VolumeContentSource | None = None,
    ) -> csi_pb2.CreateVolumeRequest:
        """A CreateVolume that a driver must accept."""
        params = self.options.parameters
        raw = capability is not None and capability.HasField("block")
        usual_bytes = params.raw_size_bytes if raw and params.raw_size_bytes else params.size_bytes
        return csi_pb2.CreateVolumeRequest(
            name=name or self.name(),
            volume_capabilities=[capability or self.mount],
            capacity_range=csi_pb2.CapacityRange(required_bytes=size_bytes or usual_bytes),
            parameters=params.parameters,
            volume_content_source=source,
        )

    def create(self, request: csi_pb2.CreateVolumeRequest) -> Volume:
        """CreateVolume that must be OK."""
        volume: Volume = self.ask(request).volume
        return volume

    def volume(
        self,
        capability: VolumeCapability | None = None,
        *,
        size_bytes: int = 0,
        source: csi_pb2.VolumeContentSource | None = None,
    ) -> Volume:
        """A new volume."""
        return self.create(self.create_request(capability, size_bytes=size_bytes, source=source))

    def volume_for(self, *capabilities: VolumeCapability) -> Volume:
        """A new volume for use in each of these ways, one after the other.

        A driver may refuse to make such a volume; then the case is skipped.
        """
        request = self.create_request()
        del request.volume_capabilities[:]
        request.volume_capabilities.extend(capabilities)
        try:
            return self.create(request)
        except Refusal as refusal:
            if len(capabilities) > 1 and refusal.code is Code.INVALID_ARGUMENT:
                pytest.skip("a volume that is made for several capabilities")
            raise

    def staged(self) -> tuple[Volume, Path]:
        """A new staged volume, and a new target path."""
        volume = self.volume()
        self.stage(volume)
        return volume, self.target()

    def used(
        self,
        capability: VolumeCapability | None = None,
        *,
        source: csi_pb2.VolumeContentSource | None = None,
        file: bytes = b"",
    ) -> tuple[Volume, Path]:
        """A new volume, and the target at which it is published; with `file` in it, if given."""
        volume = self.volume(capability, source=source)
        target = self.use(volume, capability)
        if file:
            self.host.write(target / "file", file)
        return volume, target

    def file(self, target: Path) -> bytes:
        """The content of the file that `used` writes."""
        return self.host.read(target / "file", _FILE_MAX_BYTES)

    def validate_request(
        self, volume: Volume, *capabilities: VolumeCapability
    ) -> csi_pb2.ValidateVolumeCapabilitiesRequest:
        """A ValidateVolumeCapabilities."""
        return csi_pb2.ValidateVolumeCapabilitiesRequest(
            volume_id=volume.volume_id, volume_capabilities=capabilities
        )

    def delete_request(self, volume_id: str) -> csi_pb2.DeleteVolumeRequest:
        """A DeleteVolume."""
        return csi_pb2.DeleteVolumeRequest(volume_id=volume_id)

    def delete(self, volume_id: str) -> None:
        """DeleteVolume that must be OK."""
        self.ask(self.delete_request(volume_id))

    def attach_request(
        self, volume: Volume, capability: VolumeCapability | None = None, *, readonly: bool = False
    ) -> csi_pb2.ControllerPublishVolumeRequest:
        """A ControllerPublishVolume to this node."""
        kind = csi_pb2.ControllerPublishVolumeRequest
        return self.request(kind, volume, capability, node_id=self.node_id(), readonly=readonly)

    def attach(
        self, volume: Volume, capability: VolumeCapability | None = None, *, readonly: bool = False
    ) -> None:
        """ControllerPublishVolume, if the driver attaches."""
        if PUBLISH not in self.has:
            return
        request = self.attach_request(volume, capability, readonly=readonly)
        self._attached[volume.volume_id] = dict(self.until_final(request).publish_context)

    def detach_request(self, volume_id: str) -> csi_pb2.ControllerUnpublishVolumeRequest:
        """A ControllerUnpublishVolume from this node."""
        kind = csi_pb2.ControllerUnpublishVolumeRequest
        return kind(volume_id=volume_id, node_id=self.node_id())

    def detach(self, volume_id: str) -> None:
        """ControllerUnpublishVolume, if the driver attaches."""
        if PUBLISH in self.has:
            self.until_final(self.detach_request(volume_id))

    def node_info(self) -> csi_pb2.NodeGetInfoResponse:
        """The NodeGetInfo of this node."""
        return self.ask(csi_pb2.NodeGetInfoRequest())

    def node_id(self) -> str:
        """This node's id."""
        return str(self.node_info().node_id)

    def staging(self, volume: Volume, name: str = "globalmount") -> Path:
        """A staging path; the CO makes it."""
        path = self.root / "plugins" / f"{volume.volume_id[-40:].replace('/', '_')}" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def target(self, pod: str = "") -> Path:
        """A target path: the CO makes the parent, the driver makes the target."""
        parent = self.root / "pods" / (pod or self.name("pod"))
        parent.mkdir(parents=True, exist_ok=True)
        return parent / "mount"

    def stage_request(
        self, volume: Volume, capability: VolumeCapability | None = None
    ) -> csi_pb2.NodeStageVolumeRequest:
        """A NodeStageVolume that a driver must accept."""
        return self.request(csi_pb2.NodeStageVolumeRequest, volume, capability)

    def stage(self, volume: Volume, capability: VolumeCapability | None = None) -> None:
        """Attach and stage, if the driver does."""
        self.attach(volume, capability)
        if STAGE in self.has:
            self.until_final(self.stage_request(volume, capability))

    def unstage_request(self, volume: Volume) -> csi_pb2.NodeUnstageVolumeRequest:
        """A NodeUnstageVolume."""
        return self.request(csi_pb2.NodeUnstageVolumeRequest, volume)

    def unstage(self, volume: Volume) -> None:
        """NodeUnstageVolume, if the driver stages."""
        if STAGE in self.has:
            self.until_final(self.unstage_request(volume))

    def publish_request(
        self,
        volume: Volume,
        target: Path,
        capability: VolumeCapability | None = None,
        *,
        readonly: bool = False,
    ) -> csi_pb2.NodePublishVolumeRequest:
        """A NodePublishVolume that a driver must accept once the volume is staged."""
        kind = csi_pb2.NodePublishVolumeRequest
        return self.request(kind, volume, capability, target_path=str(target), readonly=readonly)

    def ephemeral_request(self, target: Path) -> csi_pb2.NodePublishVolumeRequest:
        """A NodePublishVolume of a new inline ephemeral volume, as a kubelet sends it."""
        context = self.options.parameters.ephemeral_context
        return csi_pb2.NodePublishVolumeRequest(
            volume_id="csi-" + self.name("").encode().hex().ljust(64, "0")[:64],
            target_path=str(target),
            volume_capability=self.mount,
            volume_context={**context, "csi.storage.k8s.io/ephemeral": "true"},
        )

    def publish(
        self,
        volume: Volume,
        capability: VolumeCapability | None = None,
        *,
        target: Path | None = None,
        readonly: bool = False,
    ) -> Path:
        """NodePublishVolume for a pod; returns the target."""
        target = target or self.target()
        request = self.publish_request(volume, target, capability, readonly=readonly)
        self.until_final(request)
        return target

    def published_again(
        self, volume: Volume, capability: VolumeCapability, *, readonly: bool = False
    ) -> Path | None:
        """A second target of a published volume; None if the driver refuses it, which breaks a SHOULD."""
        target = self.target()
        with self.should():
            return self.publish(volume, capability, target=target, readonly=readonly)
        return None

    def unpublish_request(self, volume_id: str, target: Path) -> csi_pb2.NodeUnpublishVolumeRequest:
        """A NodeUnpublishVolume."""
        return csi_pb2.NodeUnpublishVolumeRequest(volume_id=volume_id, target_path=str(target))

    def unpublish(self, volume_id: str, target: Path) -> None:
        """NodeUnpublishVolume that must be OK."""
        self.until_final(self.unpublish_request(volume_id, target))

    def deferred(self, request: csi_pb2.NodePublishVolumeRequest) -> Any:
        """A NodePublishVolume of a CO that knows deferral, and must be OK."""
        request.defer_fs_ops = True
        return self.until_final(request, metadata=extensions.METADATA)

    def use(self, volume: Volume, capability: VolumeCapability | None = None) -> Path:
        """Attach, stage and publish; returns the target."""
        self.stage(volume, capability)
        return self.publish(volume, capability)

    def release(self, volume: Volume, target: Path) -> None:
        """Unpublish, unstage and detach."""
        self.unpublish(volume.volume_id, target)
        self.unstage(volume)
        self.detach(volume.volume_id)

    def can_write(self, path: Path) -> bool:
        """Whether a byte can be written, to what is not read-only. Raises `OSError`."""
        try:
            self.host.write(path, b"!")
        except OSError as err:
            if err.errno not in _READ_ONLY:
                raise
            return False
        return True


class _Weaker:
    """Turns a failed assertion into a finding of the CO. A class, so that mypy sees the suppressed exception."""

    def __init__(self, co: Co, clause: Clause) -> None:
        self._co = co
        self._clause = clause

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, (AssertionError, OSError)):
            return False
        self._co.findings.append(Finding(self._clause, explained(error), self._co.last))
        return True
