"""The requests that the driver gets in place of the CO's: the same volume, as a raw block device at private paths.

They belong to operations that outlive their caller, so they have a deadline of their own. The driver knows nothing of
crust: the metadata is the caller's without crust's extensions, and no request has a field or a key of crust.

The shim changes the kind of access, the paths, `readonly` (some drivers refuse a read-only block volume, and no
driver enforces it), the flag, the keys of crust in the volume context, and removes the passphrase of an encrypted
volume, which is for the guest. Everything else stays: access mode, publish context, other secrets, the pod's data,
the vendor's keys.
"""

from collections.abc import Mapping
from typing import Any

from crust.core import deferral_keys
from crust.csi_shim.wrap.private_directories import PrivatePaths
from crust.rpc.call import Metadata
from crust.rpc.messages import extensions
from crust.wire.csi.v1 import csi_pb2

TIMEOUT_S = 100.0
"""Below the proxy's deadline for the shim, so that the proxy gets the driver's status."""


def stage_request(
    request: csi_pb2.NodeStageVolumeRequest, paths: PrivatePaths
) -> csi_pb2.NodeStageVolumeRequest:
    rewritten = csi_pb2.NodeStageVolumeRequest()
    rewritten.CopyFrom(request)
    rewritten.staging_target_path = paths.staging
    rewritten.volume_capability.block.SetInParent()
    _take_own_keys(rewritten)
    return rewritten


def publish_request(
    request: csi_pb2.NodePublishVolumeRequest, paths: PrivatePaths, *, staged: bool
) -> csi_pb2.NodePublishVolumeRequest:
    rewritten = csi_pb2.NodePublishVolumeRequest()
    rewritten.CopyFrom(request)
    rewritten.target_path = paths.leaf(request.target_path)
    if staged:
        rewritten.staging_target_path = paths.staging
    rewritten.volume_capability.block.SetInParent()
    rewritten.readonly = False
    rewritten.ClearField("defer_fs_ops")
    _take_own_keys(rewritten)
    return rewritten


def publish_of(request: csi_pb2.NodeStageVolumeRequest) -> csi_pb2.NodePublishVolumeRequest:
    """The shim's own publish of a staged volume, with the CO's staging path as its target."""
    return csi_pb2.NodePublishVolumeRequest(
        volume_id=request.volume_id,
        publish_context=request.publish_context,
        target_path=request.staging_target_path,
        volume_capability=request.volume_capability,
        volume_context=request.volume_context,
    )


def expand_request(
    request: csi_pb2.NodeExpandVolumeRequest, paths: PrivatePaths, volume_path: str, *, staged: bool
) -> csi_pb2.NodeExpandVolumeRequest:
    """NodeExpandVolume as block, with both paths."""
    rewritten = csi_pb2.NodeExpandVolumeRequest()
    rewritten.CopyFrom(request)
    rewritten.volume_path = volume_path
    if staged:
        rewritten.staging_target_path = paths.staging
    else:
        rewritten.ClearField("staging_target_path")
    if rewritten.HasField("volume_capability"):
        rewritten.volume_capability.block.SetInParent()
    rewritten.ClearField("defer_fs_ops")
    return rewritten


def stage_of(request: csi_pb2.NodePublishVolumeRequest) -> csi_pb2.NodeStageVolumeRequest:
    """The NodeStageVolume, without secrets, that a CO must have sent before this publish."""
    stage_ = csi_pb2.NodeStageVolumeRequest(
        volume_id=request.volume_id,
        publish_context=request.publish_context,
        staging_target_path=request.staging_target_path,
        volume_capability=request.volume_capability,
    )
    for key, value in request.volume_context.items():
        if not key.startswith(deferral_keys.KUBERNETES):  # the kubelet's, of a publish alone
            stage_.volume_context[key] = value
    return stage_


def _take_own_keys(
    request: csi_pb2.NodeStageVolumeRequest | csi_pb2.NodePublishVolumeRequest,
) -> None:
    if deferral_keys.ENCRYPTION in request.volume_context:
        request.secrets.pop(deferral_keys.PASSPHRASE, None)
    deferral_keys.remove(request.volume_context)


def unpublish_request(paths: PrivatePaths, leaf: str) -> csi_pb2.NodeUnpublishVolumeRequest:
    return csi_pb2.NodeUnpublishVolumeRequest(volume_id=paths.key.volume_id, target_path=leaf)


def onward(metadata: Metadata) -> Mapping[str, Any]:
    """The arguments of a call to the driver: the caller's metadata without extensions, and a deadline of its own."""
    ours = (extensions.KEY, extensions.STAGE_AS, extensions.GUEST_KERNEL)
    plain = tuple(pair for pair in metadata if pair[0] not in ours)
    return {"metadata": plain, "timeout": TIMEOUT_S}
