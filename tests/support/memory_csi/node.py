"""The Node service: of a driver that has any volume and checks nothing, and of one that keeps CSI's rules."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from crust.wire.csi.v1 import csi_pb2
from tests.support.memory_csi.controller import SLOTS
from tests.support.memory_csi.state import (
    HEALTHY,
    MIB,
    NODE,
    SIDECARS,
    Code,
    Content,
    Failure,
    Published,
    State,
    Volume,
    check_capability,
    check_group,
    check_map,
    check_text,
    topology,
)

Mode = csi_pb2.VolumeCapability.AccessMode
_SHARED = {
    Mode.SINGLE_NODE_MULTI_WRITER,
    Mode.MULTI_NODE_READER_ONLY,
    Mode.MULTI_NODE_SINGLE_WRITER,
    Mode.MULTI_NODE_MULTI_WRITER,
}
_READERS = {Mode.SINGLE_NODE_READER_ONLY, Mode.MULTI_NODE_READER_ONLY}
_TARGET_MAX_BYTES = 4096
_ANY_BYTES = 64 * MIB

Describe = Callable[[csi_pb2.NodePublishVolumeRequest], csi_pb2.DeferredMount]


class Mounts:
    """What a publish makes at its target: nothing. Each call may be repeated."""

    def publish(self, request: csi_pb2.NodePublishVolumeRequest) -> None:
        """Make it."""

    def unpublish(self, request: csi_pb2.NodeUnpublishVolumeRequest) -> None:
        """Remove it."""


class TargetMounts(Mounts):
    """A file or a directory, as CSI says."""

    def publish(self, request: csi_pb2.NodePublishVolumeRequest) -> None:
        if request.volume_capability.HasField("block"):
            Path(request.target_path).touch()
        else:
            Path(request.target_path).mkdir(exist_ok=True)

    def unpublish(self, request: csi_pb2.NodeUnpublishVolumeRequest) -> None:
        target = Path(request.target_path)
        target.rmdir() if target.is_dir() else target.unlink()


class Node:
    """One method per RPC. It has any volume; what it refuses is another publish at the same target."""

    def __init__(self, state: State, describe: Describe, mounts: Mounts) -> None:
        self.state = state
        self.describe = describe
        self.mounts = mounts
        self.findings: list[csi_pb2.VolumeHealth.VolumeHealthEntry] = []

    def find(self, volume_id: str) -> Volume:
        wire = csi_pb2.Volume(volume_id=volume_id, capacity_bytes=_ANY_BYTES)
        volume = Volume(csi_pb2.CreateVolumeRequest(), wire, Content(bytearray()))
        return self.state.volumes.setdefault(volume_id, volume)

    def NodeGetInfo(self, request: Any) -> Any:
        return csi_pb2.NodeGetInfoResponse(node_id=NODE)

    def NodeStageVolume(self, request: Any) -> Any:
        how = request.volume_capability.SerializeToString()
        self.find(request.volume_id).staged[request.staging_target_path] = how
        return csi_pb2.NodeStageVolumeResponse()

    def NodeUnstageVolume(self, request: Any) -> Any:
        self.find(request.volume_id).staged.pop(request.staging_target_path, None)
        return csi_pb2.NodeUnstageVolumeResponse()

    def NodePublishVolume(self, request: Any) -> Any:
        target = request.target_path
        wanted = self.published(request)
        if self.state.targets.setdefault(target, wanted).identity != wanted.identity:
            raise Failure(Code.ALREADY_EXISTS, "published differently")
        self.mounts.publish(request)
        answer = csi_pb2.NodePublishVolumeResponse()
        if request.defer_fs_ops:
            answer.deferred_mount.CopyFrom(self.describe(request))
        return answer

    def published(self, request: Any) -> Published:
        """The publish that is asked for."""
        identity = request.volume_id, request.defer_fs_ops, request.readonly
        volume = self.find(request.volume_id)
        return Published(volume, identity, request.defer_fs_ops, request.readonly)

    def NodeUnpublishVolume(self, request: Any) -> Any:
        self.state.targets.pop(request.target_path, None)
        self.mounts.unpublish(request)
        return csi_pb2.NodeUnpublishVolumeResponse()

    def NodeGetVolumeStats(self, request: Any) -> Any:
        usage = csi_pb2.VolumeUsage(unit=csi_pb2.VolumeUsage.BYTES, total=7, used=3, available=4)
        return csi_pb2.NodeGetVolumeStatsResponse(usage=[usage])

    def NodeExpandVolume(self, request: Any) -> Any:
        wire = self.find(request.volume_id).wire
        wire.capacity_bytes = max(wire.capacity_bytes, request.capacity_range.required_bytes)
        return csi_pb2.NodeExpandVolumeResponse(capacity_bytes=wire.capacity_bytes)

    def NodeGetVolumeHealth(self, request: Any) -> Any:
        health = csi_pb2.VolumeHealth(volume_id=request.volume_id, health_statuses=self.findings)
        return csi_pb2.NodeGetVolumeHealthResponse(volume_health=health)


class StrictNode(Node):
    """The same of volumes that the controller has made, with CSI's rules."""

    def __init__(self, state: State, describe: Describe, faults: set[str]) -> None:
        super().__init__(state, describe, TargetMounts())
        self.faults = faults

    def find(self, volume_id: str) -> Volume:
        return self.state.find(volume_id)

    def NodeGetInfo(self, request: Any) -> Any:
        return csi_pb2.NodeGetInfoResponse(
            node_id=NODE, max_volumes_per_node=SLOTS, accessible_topology=topology()
        )

    def NodeGetID(self, request: Any) -> Any:
        return csi_pb2.NodeGetIDResponse(node_id=NODE)

    def NodeStageVolume(self, request: Any) -> Any:
        self._check_path(request.staging_target_path)
        check_capability(request.volume_capability, Code.FAILED_PRECONDITION)
        volume = self.find(request.volume_id)
        how = request.volume_capability.SerializeToString()
        if volume.staged.get(request.staging_target_path, how) != how:
            if "restage-unstages" in self.faults:
                volume.staged.clear()
            raise Failure(Code.ALREADY_EXISTS, "staged differently")
        formats = request.staging_target_path not in volume.staged
        if "format-again" in self.faults and formats:
            volume.content.files.clear()
            volume.content.raw[:] = bytes(len(volume.content.raw))
        if "format-second-path" in self.faults and formats and volume.staged:
            volume.content.files.clear()
        grows = volume.content.fs_bytes == 0 or "never-grows" not in self.faults
        if request.volume_capability.HasField("mount") and grows:
            volume.content.fs_bytes = len(volume.content.raw)
        return super().NodeStageVolume(request)

    def _check_path(self, path: str) -> None:
        check_text(path, 128 if "short-paths" in self.faults else _TARGET_MAX_BYTES)

    def NodeUnstageVolume(self, request: Any) -> Any:
        check_text(request.volume_id)
        self._check_path(request.staging_target_path)
        volume = self.state.volumes.get(request.volume_id)
        if volume is None:
            return csi_pb2.NodeUnstageVolumeResponse()
        if self.state.is_used(volume):
            if "unstage-rips" in self.faults:
                volume.content.files.clear()
            elif len(volume.staged) == 1:
                raise Failure(Code.FAILED_PRECONDITION, "published")
        return super().NodeUnstageVolume(request)

    def NodePublishVolume(self, request: Any) -> Any:
        self._check_path(request.target_path)
        check_map(request.volume_context)
        check_map(request.publish_context)
        check_capability(request.volume_capability, Code.FAILED_PRECONDITION)
        check_group(request.volume_capability.mount, self.faults)
        if request.volume_context.get("csi.storage.k8s.io/ephemeral") == "true":
            self._make_ephemeral(request)
        else:
            self._check_staged(request)
        published = self.state.targets.get(request.target_path)
        if published is None:
            self._check_sharing(self.find(request.volume_id), request.volume_capability)
        try:
            answer = super().NodePublishVolume(request)
        except Failure:
            if published is not None:
                published.mounts -= "republish-unmounts" in self.faults
            raise
        if published is not None:
            published.mounts += "mounts-again" in self.faults
        return answer

    def _check_staged(self, request: Any) -> None:
        volume = self.find(request.volume_id)
        if not request.staging_target_path:
            raise Failure(Code.FAILED_PRECONDITION, "no staging path")
        if request.staging_target_path not in volume.staged:
            raise Failure(Code.FAILED_PRECONDITION, "not staged")

    def _check_sharing(self, volume: Volume, capability: csi_pb2.VolumeCapability) -> None:
        others = [target for target in self.state.targets.values() if target.volume is volume]
        if others and "never-shares" in self.faults:
            raise Failure(Code.FAILED_PRECONDITION, "one target")
        if others and capability.access_mode.mode not in _SHARED:
            raise Failure(Code.FAILED_PRECONDITION, "one writer, one target")
        if any(other.capability != capability.SerializeToString() for other in others):
            raise Failure(Code.FAILED_PRECONDITION, "with another capability")

    def published(self, request: Any) -> Published:
        published = super().published(request)
        published.capability = request.volume_capability.SerializeToString()
        kept = {
            key: value
            for key, value in request.volume_context.items()
            if not key.startswith(SIDECARS) or "strict-context" in self.faults
        }
        published.identity = (*published.identity, published.capability, kept)
        is_block = request.volume_capability.HasField("block")
        published.is_block = is_block and "block-is-a-file" not in self.faults
        published.readonly = self._is_readonly(request, published.volume)
        if "no-group" not in self.faults:
            published.group = int(request.volume_capability.mount.volume_mount_group or 0)
        published.mounts = 0 if request.defer_fs_ops and "defer-mounts" not in self.faults else 1
        return published

    def _is_readonly(self, request: Any, volume: Volume) -> bool:
        """Whether nothing may be written; each fault forgets one of the ways to say so."""
        capability = request.volume_capability
        if request.readonly and {"readonly-for-ever", "readonly-is-for-all"} & self.faults:
            volume.readonly = True
        ways = {
            "readonly-is-writable": request.readonly,
            "readers-write": capability.access_mode.mode in _READERS,
            "ro-is-writable": "ro" in capability.mount.mount_flags,
            "attached-readonly-is-writable": volume.readonly,
        }
        return any(readonly for fault, readonly in ways.items() if fault not in self.faults)

    def _make_ephemeral(self, request: Any) -> None:
        check_text(request.volume_id)
        wire = csi_pb2.Volume(volume_id=request.volume_id, capacity_bytes=MIB)
        content = Content(bytearray(MIB), {}, MIB)
        volume = Volume(csi_pb2.CreateVolumeRequest(), wire, content)
        self.state.volumes.setdefault(request.volume_id, volume)

    def NodeUnpublishVolume(self, request: Any) -> Any:
        check_text(request.volume_id)
        self._check_path(request.target_path)
        published = self.state.targets.get(request.target_path)
        if published is None:
            return csi_pb2.NodeUnpublishVolumeResponse()
        if "target-stays" in self.faults:
            del self.state.targets[request.target_path]
        else:
            super().NodeUnpublishVolume(request)
        if "unpublish-forgets-all" in self.faults:
            for path in [k for k, v in self.state.targets.items() if v.volume is published.volume]:
                del self.state.targets[path]
        if request.volume_id.startswith("csi-") and "ephemeral-stays" not in self.faults:
            self.state.volumes.pop(request.volume_id, None)
        return csi_pb2.NodeUnpublishVolumeResponse()

    def _at(self, volume_id: str, path: str) -> Published:
        check_text(path, _TARGET_MAX_BYTES)
        volume = self.find(volume_id)
        published = self.state.targets.get(path)
        if published is None or published.volume is not volume:
            raise Failure(Code.NOT_FOUND, "not there")
        return published

    def NodeGetVolumeStats(self, request: Any) -> Any:
        published = self._at(request.volume_id, request.volume_path)
        content = published.volume.content
        usage = csi_pb2.VolumeUsage
        if published.is_block:
            usages = [usage(unit=usage.BYTES, total=len(content.raw))]
            return csi_pb2.NodeGetVolumeStatsResponse(usage=usages, volume_condition=HEALTHY)
        used = sum(map(len, content.files.values()))
        total = content.fs_bytes
        if "constant-stats" in self.faults:
            used = 0
        usages = [
            usage(unit=usage.BYTES, total=total, used=used, available=total - used),
            usage(unit=usage.INODES, total=99, used=len(content.files), available=50),
        ]
        return csi_pb2.NodeGetVolumeStatsResponse(usage=usages, volume_condition=HEALTHY)

    def NodeExpandVolume(self, request: Any) -> Any:
        published = self._at(request.volume_id, request.volume_path)
        if request.HasField("volume_capability"):
            check_capability(request.volume_capability)
        if request.capacity_range.required_bytes > published.volume.wire.capacity_bytes:
            raise Failure(Code.OUT_OF_RANGE, "the device has not so much")
        if "never-grows" not in self.faults:
            published.volume.content.fs_bytes = len(published.volume.content.raw)
        if "grow-loses" in self.faults:
            published.volume.content.files.clear()
        return super().NodeExpandVolume(request)

    def NodeGetVolumeHealth(self, request: Any) -> Any:
        self._at(request.volume_id, request.volume_publish_path)
        return super().NodeGetVolumeHealth(request)

    def NodeGetStorageHealth(self, request: Any) -> Any:
        return csi_pb2.NodeGetStorageHealthResponse()
