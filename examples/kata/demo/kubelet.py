"""The CO of the demo: the CSI calls of a kubelet and the sidecars, over the driver's socket."""

import asyncio
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import grpc.aio

from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from crust.wire.v1 import inspect_pb2, inspect_pb2_grpc

TIMEOUT_S = 120.0
START_TIMEOUT_S = 600.0
_PROBE_INTERVAL_S = 0.2
# A kubelet and the sidecars retry after UNAVAILABLE, which a process that is just starting answers.
_RETRIES = {
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.3s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}


def capability(
    fs_type: str = "ext4", group: str = "", policy: str = ""
) -> csi_pb2.VolumeCapability:
    """How the volume is used: mounted, by one writer on one node; `group` and `policy` as in a pod's fsGroup."""
    return csi_pb2.VolumeCapability(
        mount=csi_pb2.VolumeCapability.MountVolume(
            fs_type=fs_type,
            volume_supplemental_group=group,
            volume_supplemental_group_change_policy=policy,
        ),
        access_mode=csi_pb2.VolumeCapability.AccessMode(
            mode=csi_pb2.VolumeCapability.AccessMode.SINGLE_NODE_WRITER
        ),
    )


MOUNT = capability()


class Kubelet:
    """Calls the proxy's CSI socket and, as the sidecars, the controller's. `close` it.

    `parameters` are the StorageClass's, `secrets` its node-stage secrets, `publish_secrets` those of node-publish;
    with `attaches` a volume is published to the node before it is staged. Without `expands_at_controller` the
    controller has no expansion, and external-resizer only marks the new size.
    """

    def __init__(
        self,
        root: Path,
        csi_socket: str,
        inspect_socket: str,
        controller_socket: str = "",
    ) -> None:
        self.parameters: dict[str, str] = {}
        self.secrets: dict[str, str] = {}
        self.publish_secrets: dict[str, str] = {}
        self.attaches = False
        self.expands_at_controller = True
        self._root = root
        self._node_id = ""
        self._published: dict[str, dict[str, str]] = {}
        self._csi = _connect(csi_socket)
        self._sidecars = _connect(controller_socket or csi_socket)
        self._inspect = channel.connect(inspect_socket)
        self._identity = csi_pb2_grpc.IdentityStub(self._csi)
        self._controller = csi_pb2_grpc.ControllerStub(self._sidecars)
        self._node = csi_pb2_grpc.NodeStub(self._csi)

    def staging(self, volume: csi_pb2.Volume) -> Path:
        """The staging path of a volume; the kubelet creates the directory."""
        name = hashlib.sha256(volume.volume_id.encode()).hexdigest()
        return self._root / "plugins" / "staging" / name / "globalmount"

    def target(self, pod: str) -> Path:
        """The target path of a pod's volume; the kubelet creates its parent."""
        return self._root / "pods" / pod / "volumes" / "kubernetes.io~csi" / "data" / "mount"

    async def wait_ready(self, handler: str) -> None:
        """Return when the driver answers through the chain and the handler is registered."""
        async with asyncio.timeout(START_TIMEOUT_S):
            await self._probed()
            watch = inspect_pb2_grpc.InspectStub(self._inspect)
            events = watch.Watch(inspect_pb2.WatchRequest(), wait_for_ready=True)
            await events.initial_metadata()
            try:
                while not await self._registered(handler):
                    await events.read()
            finally:
                events.cancel()

    async def _probed(self) -> None:
        """Probe until the driver answers through proxy and shim, which start in any order."""
        while True:
            try:
                await self._identity.Probe(csi_pb2.ProbeRequest(), wait_for_ready=True)
                return
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            await asyncio.sleep(_PROBE_INTERVAL_S)

    async def _registered(self, handler: str) -> bool:
        stub = inspect_pb2_grpc.InspectStub(self._inspect)
        answer = await stub.ListHandlers(inspect_pb2.ListHandlersRequest(), timeout=TIMEOUT_S)
        return any(listed.registration.name == handler for listed in answer.handlers)

    async def create(
        self,
        name: str,
        size_bytes: int,
        capability: csi_pb2.VolumeCapability = MOUNT,
        *,
        snapshot_id: str = "",
        topology: Mapping[str, str] | None = None,
    ) -> csi_pb2.Volume:
        """CreateVolume, from a snapshot if `snapshot_id` is set; in that topology alone if one is given."""
        source = csi_pb2.VolumeContentSource.SnapshotSource(snapshot_id=snapshot_id)
        answer = await self._controller.CreateVolume(
            csi_pb2.CreateVolumeRequest(
                name=name,
                parameters=self.parameters,
                capacity_range=csi_pb2.CapacityRange(required_bytes=size_bytes),
                volume_capabilities=[capability],
                accessibility_requirements=_only(topology) if topology else None,
                volume_content_source=csi_pb2.VolumeContentSource(snapshot=source)
                if snapshot_id
                else None,
            ),
            timeout=TIMEOUT_S,
        )
        return answer.volume

    async def topology(self) -> dict[str, str]:
        """The segment of this node, as the kubelet writes it to Node and CSINode."""
        info = await self._node.NodeGetInfo(csi_pb2.NodeGetInfoRequest(), timeout=TIMEOUT_S)
        return dict(info.accessible_topology.segments)

    async def capacity(self, topology: Mapping[str, str]) -> tuple[int, int]:
        """GetCapacity of a segment: the free bytes, and the largest volume."""
        answer = await self._controller.GetCapacity(
            csi_pb2.GetCapacityRequest(
                parameters=self.parameters,
                volume_capabilities=[MOUNT],
                accessible_topology=csi_pb2.Topology(segments=topology),
            ),
            timeout=TIMEOUT_S,
        )
        return answer.available_capacity, answer.maximum_volume_size.value

    async def attach(self, volume: csi_pb2.Volume, capability: csi_pb2.VolumeCapability) -> None:
        """ControllerPublishVolume, to the node that NodeGetInfo names."""
        if not self._node_id:
            info = await self._node.NodeGetInfo(csi_pb2.NodeGetInfoRequest(), timeout=TIMEOUT_S)
            self._node_id = info.node_id
        answer = await self._controller.ControllerPublishVolume(
            csi_pb2.ControllerPublishVolumeRequest(
                volume_id=volume.volume_id,
                node_id=self._node_id,
                volume_context=volume.volume_context,
                volume_capability=capability,
            ),
            timeout=TIMEOUT_S,
        )
        self._published[volume.volume_id] = dict(answer.publish_context)

    async def stage(
        self, volume: csi_pb2.Volume, capability: csi_pb2.VolumeCapability = MOUNT
    ) -> None:
        """NodeStageVolume, after the attach if there is one."""
        if self.attaches:
            await self.attach(volume, capability)
        self.staging(volume).mkdir(parents=True, exist_ok=True)
        await self._node.NodeStageVolume(
            csi_pb2.NodeStageVolumeRequest(
                volume_id=volume.volume_id,
                volume_context=volume.volume_context,
                publish_context=self._published.get(volume.volume_id, {}),
                staging_target_path=str(self.staging(volume)),
                volume_capability=capability,
                secrets=self.secrets,
            ),
            timeout=TIMEOUT_S,
        )

    async def publish(
        self,
        volume: csi_pb2.Volume,
        target: Path,
        *,
        defer: bool,
        capability: csi_pb2.VolumeCapability = MOUNT,
        readonly: bool = False,
    ) -> None:
        """NodePublishVolume."""
        target.parent.mkdir(parents=True, exist_ok=True)
        await self._node.NodePublishVolume(
            csi_pb2.NodePublishVolumeRequest(
                volume_id=volume.volume_id,
                volume_context=volume.volume_context,
                publish_context=self._published.get(volume.volume_id, {}),
                staging_target_path=str(self.staging(volume)),
                target_path=str(target),
                volume_capability=capability,
                readonly=readonly,
                secrets=self.publish_secrets,
                defer_fs_ops=defer,
            ),
            timeout=TIMEOUT_S,
        )

    async def stats(self, volume: csi_pb2.Volume, target: Path) -> dict[int, csi_pb2.VolumeUsage]:
        """NodeGetVolumeStats, by unit. Waits for a proxy that is just starting, as a kubelet's retry would."""
        answer = await self._node.NodeGetVolumeStats(
            csi_pb2.NodeGetVolumeStatsRequest(volume_id=volume.volume_id, volume_path=str(target)),
            timeout=TIMEOUT_S,
            wait_for_ready=True,
        )
        return {usage.unit: usage for usage in answer.usage}

    async def expand(self, volume: csi_pb2.Volume, target: Path, size_bytes: int) -> int:
        """ControllerExpandVolume if the controller has it, then NodeExpandVolume; returns the size in bytes."""
        capacity = csi_pb2.CapacityRange(required_bytes=size_bytes)
        if self.expands_at_controller:
            await self._controller.ControllerExpandVolume(
                csi_pb2.ControllerExpandVolumeRequest(
                    volume_id=volume.volume_id, capacity_range=capacity, volume_capability=MOUNT
                ),
                timeout=TIMEOUT_S,
            )
        answer = await self._node.NodeExpandVolume(
            csi_pb2.NodeExpandVolumeRequest(
                volume_id=volume.volume_id,
                volume_path=str(target),
                staging_target_path=str(self.staging(volume)),
                capacity_range=capacity,
                volume_capability=MOUNT,
            ),
            timeout=TIMEOUT_S,
        )
        return answer.capacity_bytes

    async def unpublish(self, volume: csi_pb2.Volume, target: Path) -> None:
        """NodeUnpublishVolume."""
        await self._node.NodeUnpublishVolume(
            csi_pb2.NodeUnpublishVolumeRequest(volume_id=volume.volume_id, target_path=str(target)),
            timeout=TIMEOUT_S,
        )

    async def unstage(self, volume: csi_pb2.Volume) -> None:
        """NodeUnstageVolume, and the detach if there was an attach."""
        await self._node.NodeUnstageVolume(
            csi_pb2.NodeUnstageVolumeRequest(
                volume_id=volume.volume_id, staging_target_path=str(self.staging(volume))
            ),
            timeout=TIMEOUT_S,
        )
        if self.attaches:
            await self._controller.ControllerUnpublishVolume(
                csi_pb2.ControllerUnpublishVolumeRequest(
                    volume_id=volume.volume_id, node_id=self._node_id
                ),
                timeout=TIMEOUT_S,
            )

    async def snapshot(self, volume: csi_pb2.Volume, name: str) -> str:
        """CreateSnapshot; returns its id."""
        answer = await self._controller.CreateSnapshot(
            csi_pb2.CreateSnapshotRequest(source_volume_id=volume.volume_id, name=name),
            timeout=TIMEOUT_S,
        )
        return answer.snapshot.snapshot_id

    async def delete_snapshot(self, snapshot_id: str) -> None:
        """DeleteSnapshot."""
        await self._controller.DeleteSnapshot(
            csi_pb2.DeleteSnapshotRequest(snapshot_id=snapshot_id), timeout=TIMEOUT_S
        )

    async def delete(self, volume: csi_pb2.Volume) -> None:
        """DeleteVolume."""
        await self._controller.DeleteVolume(
            csi_pb2.DeleteVolumeRequest(volume_id=volume.volume_id), timeout=TIMEOUT_S
        )

    async def refusal_of_unpublish(self, volume: csi_pb2.Volume, target: Path) -> tuple[str, str]:
        """Unpublish a volume that is in use; returns code and message, ("OK", "") if it was not refused."""
        try:
            await self.unpublish(volume, target)
        except grpc.aio.AioRpcError as error:
            return error.code().name, error.details() or ""
        return "OK", ""

    async def close(self) -> None:
        """Close the channels."""
        await self._csi.close()
        await self._sidecars.close()
        await self._inspect.close()


def _only(topology: Mapping[str, str]) -> csi_pb2.TopologyRequirement:
    """As external-provisioner asks with --strict-topology, after a pod was scheduled."""
    here = csi_pb2.Topology(segments=topology)
    return csi_pb2.TopologyRequirement(requisite=[here], preferred=[here])


def _connect(socket: str) -> grpc.aio.Channel:
    options = [*channel.OPTIONS, ("grpc.service_config", json.dumps(_RETRIES))]
    return grpc.aio.insecure_channel(channel.target_of(socket), options=options)
