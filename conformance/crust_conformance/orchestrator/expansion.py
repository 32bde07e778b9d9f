"""The two halves of an expansion to twice the size, as external-resizer and a kubelet send them."""

from pathlib import Path

from crust.wire.csi.v1 import csi_pb2
from crust.wire.csi.v1.csi_pb2 import Volume, VolumeCapability
from crust_conformance.orchestrator.co import Co


def doubled(co: Co, volume: Volume) -> int:
    """Twice the bytes that the volume was created with."""
    return 2 * (volume.capacity_bytes or co.options.parameters.size_bytes)


def has_its_own_size(co: Co, volume: Volume, target: Path) -> bool:
    """Whether the filesystem at `target` has the volume's size.

    A volume may be a directory of a shared filesystem, which has another size. The filesystem of a device is never
    twice as large as the device.
    """
    return co.host.size_bytes(target) < doubled(co, volume)


def controller_request(
    co: Co, volume: Volume, size_bytes: int = 0, capability: VolumeCapability | None = None
) -> csi_pb2.ControllerExpandVolumeRequest:
    """The controller's half."""
    size = csi_pb2.CapacityRange(required_bytes=size_bytes or doubled(co, volume))
    kind = csi_pb2.ControllerExpandVolumeRequest
    return co.request(kind, volume, capability, capacity_range=size)


def node_request(
    co: Co,
    volume: Volume,
    target: Path,
    size_bytes: int = 0,
    capability: VolumeCapability | None = None,
) -> csi_pb2.NodeExpandVolumeRequest:
    """The node's half, where the volume is published at `target`."""
    size = csi_pb2.CapacityRange(required_bytes=size_bytes or doubled(co, volume))
    kind = csi_pb2.NodeExpandVolumeRequest
    return co.request(kind, volume, capability, volume_path=str(target), capacity_range=size)
