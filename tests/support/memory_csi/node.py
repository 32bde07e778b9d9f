"""The Node service."""

from pathlib import Path
from typing import Any

from crust.wire.csi.v1 import csi_pb2
from tests.support.memory_csi.controller import NODE, SLOTS
from tests.support.memory_csi.state import (
    MIB,
    Code,
    Content,
    Published,
    Refused,
    State,
    Volume,
    check_capability,
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


class Node:
    """One method per RPC; raises `Refused`."""

    def __init__(self, state: State, faults: set[str]) -> None:
        self.state = state
        self.faults = faults

    def NodeGetInfo(self, request: Any) -> Any:
        return csi_pb2.NodeGetInfoResponse(
            node_id=NODE,
            max_volumes_per_node=SLOTS,
            accessible_topology=topology(),
        )

    def NodeGetID(self, request: Any) -> Any:
        return csi_pb2.NodeGetIDResponse(node_id=NODE)

    def _find(self, volume_id: str) -> Volume:
        if volume_id not in self.state.volumes:
            raise Refused(Code.NOT_FOUND, "no such volume")
        return self.state.volumes[volume_id]

    def NodeStageVolume(self, request: Any) -> Any:
        check_text(request.volume_id)
        check_text(request.staging_target_path, self._path_limit())
        check_capability(request.volume_capability, Code.FAILED_PRECONDITION)
        volume = self._find(request.volume_id)
        how = request.volume_capability.SerializeToString()
        if volume.staged.get(request.staging_target_path, how) != how:
            if "restage-unstages" in self.faults:
                volume.staged.clear()
            raise Refused(Code.ALREADY_EXISTS, "staged differently")
        formats = not volume.staged or request.staging_target_path not in volume.staged
        if "format-again" in self.faults and formats:
            volume.content.files.clear()
            volume.content.raw[:] = bytes(len(volume.content.raw))
        if "format-second-path" in self.faults and formats and volume.staged:
            volume.content.files.clear()
        volume.staged[request.staging_target_path] = how
        grows = volume.content.fs_bytes == 0 or "never-grows" not in self.faults
        if request.volume_capability.HasField("mount") and grows:
            volume.content.fs_bytes = len(volume.content.raw)
        return csi_pb2.NodeStageVolumeResponse()

    def _path_limit(self) -> int:
        return 128 if "short-paths" in self.faults else _TARGET_MAX_BYTES

    def NodeUnstageVolume(self, request: Any) -> Any:
        check_text(request.volume_id)
        check_text(request.staging_target_path, self._path_limit())
        volume = self.state.volumes.get(request.volume_id)
        if volume is None:
            return csi_pb2.NodeUnstageVolumeResponse()
        used = any(each.volume is volume for each in self.state.targets.values())
        if used and len(volume.staged) == 1 and "unstage-rips" not in self.faults:
            raise Refused(Code.FAILED_PRECONDITION, "published")
        if used and "unstage-rips" in self.faults:
            volume.content.files.clear()
        volume.staged.pop(request.staging_target_path, None)
        return csi_pb2.NodeUnstageVolumeResponse()

    def NodePublishVolume(self, request: Any) -> Any:
        check_text(request.volume_id)
        check_text(request.target_path, self._path_limit())
        check_map(request.volume_context)
        check_map(request.publish_context)
        check_capability(request.volume_capability, Code.FAILED_PRECONDITION)
        if request.volume_context.get("csi.storage.k8s.io/ephemeral") == "true":
            self._make_ephemeral(request)
        else:
            self._check_staged(request)
        target = Path(request.target_path)
        identity = self._identity(request)
        there = self.state.targets.get(target)
        if there is not None:
            if there.identity != identity:
                there.mounts -= "republish-unmounts" in self.faults
                raise Refused(Code.ALREADY_EXISTS, "published differently")
            there.mounts += "mounts-again" in self.faults
            return self._answer(request, there)
        volume = self._find(request.volume_id)
        self._check_sharing(volume, request.volume_capability)
        return self._answer(request, self._mount(request, target, volume, identity))

    def _check_staged(self, request: Any) -> None:
        volume = self._find(request.volume_id)
        if not request.staging_target_path:
            raise Refused(Code.FAILED_PRECONDITION, "no staging path")
        if request.staging_target_path not in volume.staged:
            raise Refused(Code.FAILED_PRECONDITION, "not staged")

    def _check_sharing(self, volume: Volume, capability: csi_pb2.VolumeCapability) -> None:
        others = [each for each in self.state.targets.values() if each.volume is volume]
        if others and "never-shares" in self.faults:
            raise Refused(Code.FAILED_PRECONDITION, "one target")
        if others and capability.access_mode.mode not in _SHARED:
            raise Refused(Code.FAILED_PRECONDITION, "one writer, one target")
        if any(each.capability != capability.SerializeToString() for each in others):
            raise Refused(Code.FAILED_PRECONDITION, "with another capability")

    def _identity(self, request: Any) -> Any:
        kept = {
            key: value
            for key, value in request.volume_context.items()
            if not key.startswith("csi.storage.k8s.io/") or "strict-context" in self.faults
        }
        capability = request.volume_capability.SerializeToString()
        return request.volume_id, capability, request.readonly, request.defer_fs_ops, kept

    def _mount(self, request: Any, target: Path, volume: Volume, identity: Any) -> Published:
        is_block = request.volume_capability.HasField("block")
        if is_block:
            target.touch()
        else:
            target.mkdir(exist_ok=True)
        delegated = request.volume_capability.mount.volume_mount_group
        published = self.state.targets[target] = Published(
            volume=volume,
            identity=identity,
            is_block=is_block and "block-is-a-file" not in self.faults,
            readonly=self._is_readonly(request, volume),
            capability=request.volume_capability.SerializeToString(),
            group=int(delegated or 0) if "no-group" not in self.faults else 0,
            mounts=0 if request.defer_fs_ops and "defer-mounts" not in self.faults else 1,
            deferred=request.defer_fs_ops,
        )
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
        return any(said for fault, said in ways.items() if fault not in self.faults)

    def _answer(self, request: Any, published: Published) -> Any:
        if not published.deferred:
            return csi_pb2.NodePublishVolumeResponse()
        identity = csi_pb2.DeferredMount.DeviceIdentity(major=7, minor=1, disk_sequence=9)
        device = csi_pb2.DeferredMount.BlockDevice(path="/dev/memory", identity=identity)
        mount = csi_pb2.DeferredMount(
            block_device=device,
            fs_type=request.volume_capability.mount.fs_type,
            capacity_bytes=published.volume.wire.capacity_bytes,
        )
        return csi_pb2.NodePublishVolumeResponse(deferred_mount=mount)

    def _make_ephemeral(self, request: Any) -> None:
        wire = csi_pb2.Volume(volume_id=request.volume_id, capacity_bytes=MIB)
        content = Content(bytearray(MIB), {}, MIB)
        volume = Volume(csi_pb2.CreateVolumeRequest(), wire, content)
        self.state.volumes.setdefault(request.volume_id, volume)

    def NodeUnpublishVolume(self, request: Any) -> Any:
        check_text(request.volume_id)
        check_text(request.target_path, self._path_limit())
        target = Path(request.target_path)
        published = self.state.targets.pop(target, None)
        if published is None:
            return csi_pb2.NodeUnpublishVolumeResponse()
        if "target-stays" not in self.faults:
            target.rmdir() if target.is_dir() else target.unlink()
        if "unpublish-forgets-all" in self.faults:
            for each in [k for k, v in self.state.targets.items() if v.volume is published.volume]:
                del self.state.targets[each]
        if request.volume_id.startswith("csi-") and "ephemeral-stays" not in self.faults:
            self.state.volumes.pop(request.volume_id, None)
        return csi_pb2.NodeUnpublishVolumeResponse()

    def _at(self, volume_id: str, path: str) -> Published:
        check_text(volume_id)
        check_text(path, _TARGET_MAX_BYTES)
        volume = self._find(volume_id)
        published = self.state.targets.get(Path(path))
        if published is None or published.volume is not volume:
            raise Refused(Code.NOT_FOUND, "not there")
        return published

    def NodeGetVolumeStats(self, request: Any) -> Any:
        published = self._at(request.volume_id, request.volume_path)
        content = published.volume.content
        usage = csi_pb2.VolumeUsage
        condition = csi_pb2.VolumeCondition(message="nothing is wrong")
        if published.is_block:
            found = [usage(unit=usage.BYTES, total=len(content.raw))]
            return csi_pb2.NodeGetVolumeStatsResponse(usage=found, volume_condition=condition)
        used = sum(map(len, content.files.values()))
        total = content.fs_bytes
        if "constant-stats" in self.faults:
            used = 0
        found = [
            usage(unit=usage.BYTES, total=total, used=used, available=total - used),
            usage(unit=usage.INODES, total=99, used=len(content.files), available=50),
        ]
        return csi_pb2.NodeGetVolumeStatsResponse(usage=found, volume_condition=condition)

    def NodeExpandVolume(self, request: Any) -> Any:
        published = self._at(request.volume_id, request.volume_path)
        if request.HasField("volume_capability"):
            check_capability(request.volume_capability)
        if request.capacity_range.required_bytes > published.volume.wire.capacity_bytes:
            raise Refused(Code.OUT_OF_RANGE, "the device has not so much")
        if "never-grows" not in self.faults:
            published.volume.content.fs_bytes = len(published.volume.content.raw)
        if "grow-loses" in self.faults:
            published.volume.content.files.clear()
        size = published.volume.wire.capacity_bytes
        return csi_pb2.NodeExpandVolumeResponse(capacity_bytes=size)

    def NodeGetVolumeHealth(self, request: Any) -> Any:
        self._at(request.volume_id, request.volume_publish_path)
        health = csi_pb2.VolumeHealth(volume_id=request.volume_id)
        return csi_pb2.NodeGetVolumeHealthResponse(volume_health=health)

    def NodeGetStorageHealth(self, request: Any) -> Any:
        return csi_pb2.NodeGetStorageHealthResponse()
