"""A volume of a wrapped driver, and its publish as a CO sends it."""

from typing import Any

from crust.core import volumes
from crust.csi_shim.wrap.private_directories import PrivatePaths
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import capability, publish_request

MODE = csi_pb2.VolumeCapability.AccessMode
DRIVER = "csi.example.org"
KEY = volumes.VolumeKey(volumes.DriverName(DRIVER), volumes.VolumeId("vol-1"))
PATHS = PrivatePaths.of("/var/lib/kubelet", KEY)


def publish(
    *,
    mode: int = MODE.SINGLE_NODE_WRITER,
    context: dict[str, str] | None = None,
    mount: dict[str, Any] | None = None,
    block: bool = False,
    **fields: Any,
) -> csi_pb2.NodePublishVolumeRequest:
    return publish_request(
        "vol-1",
        "/var/lib/kubelet/pods/1/mount",
        capability(mode=mode, block=block, **mount or {}),
        staging="/var/lib/kubelet/plugins/kubernetes.io/csi/x/globalmount",
        volume_context=context or {},
        **{"defer": False, **fields},
    )
