"""The node's requests, decoded; `requests` has the controller's."""

from collections.abc import Mapping

from crust import deferral_keys, volumes
from crust.blockdriver.node.node_stage import Stage
from crust.blockdriver.node.publish.publish_rules import Publish
from crust.rpc.messages import csi, limits
from crust.wire.csi.v1 import csi_pb2

_KEPT = (deferral_keys.PASSPHRASE, deferral_keys.USER_ID, deferral_keys.USER_KEY)
"""The secrets of a stage that a publish needs."""

Secrets = dict[tuple[volumes.VolumeId, str], Mapping[str, str]]
"""What opens staged volumes, by volume and staging path."""


def stage(request: csi_pb2.NodeStageVolumeRequest) -> Stage:
    """NodeStageVolume."""
    volume_id = limits.volume_id(request.volume_id)
    path = volumes.TargetPath.parse(request.staging_target_path, role="staging_target_path")
    capability = _capability(request)
    _check_contexts(request)
    return Stage(volume_id, path, capability, dict(request.secrets))


def publish(request: csi_pb2.NodePublishVolumeRequest, of_stages: Secrets) -> Publish:
    """NodePublishVolume, with the secrets of its stage. Raises `limits.StagingPathNotGiven`."""
    volume_id = limits.volume_id(request.volume_id)
    target = volumes.TargetPath.parse(request.target_path)
    capability = _capability(request)
    _check_contexts(request)
    staging = request.staging_target_path
    if not staging:
        raise limits.StagingPathNotGiven()
    secrets = {**of_stages.get((volume_id, staging), {}), **kept_secrets(request)}
    return Publish(
        volume_id=volume_id,
        target=target,
        staging=volumes.TargetPath.parse(staging, role="staging_target_path"),
        capability=capability,
        readonly=request.readonly,
        deferred=request.defer_fs_ops,
        volume_context=tuple(sorted(request.volume_context.items())),
        publish_context=tuple(sorted(request.publish_context.items())),
        passphrase=secrets.get(deferral_keys.PASSPHRASE, ""),
        secrets=secrets,
    )


def kept_secrets(
    request: csi_pb2.NodeStageVolumeRequest | csi_pb2.NodePublishVolumeRequest,
) -> Mapping[str, str]:
    """Those of a request's secrets that a publish needs."""
    return {key: request.secrets[key] for key in _KEPT if request.secrets.get(key)}


def optional_path(text: str, role: str) -> volumes.TargetPath | None:
    """None for an empty one."""
    return volumes.TargetPath.parse(text, role=role) if text else None


def _capability(
    request: csi_pb2.NodeStageVolumeRequest | csi_pb2.NodePublishVolumeRequest,
) -> volumes.VolumeCapability:
    if not request.HasField("volume_capability"):
        raise limits.MissingField("volume_capability")
    return csi.capability(request.volume_capability)


def _check_contexts(
    request: csi_pb2.NodeStageVolumeRequest | csi_pb2.NodePublishVolumeRequest,
) -> None:
    limits.check_context(request.volume_context, "volume_context")
    limits.check_context(request.publish_context, "publish_context")
