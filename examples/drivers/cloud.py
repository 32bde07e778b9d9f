"""A driver as clouds have them: strict, with long ids, an attach before the stage, and secrets.

Its traps are those of public drivers. A parameter that it does not know is refused. The node finds the device by the
attach's answer. The stage of a raw volume writes a file into the staging directory; without that file nothing is
published, and an unstage answers OK and does nothing. A second publish of a raw device goes on top of the first one,
and an unpublish takes one off. A read-only raw device is refused. The size that the controller gives a volume reaches
the device only when the node expands it, and for a raw device the controller says that this is not required.
"""

import hashlib
import json
import os

from crust.wire.csi.v1 import csi_pb2
from examples.drivers import disks, image_volumes
from examples.drivers.serving import Arguments, Code, Plugin, Refused, Switches, serve

NAME = "cloud.csi.example.org"
TOKEN = "correct-token"
_PARAMETERS = ("type", "encrypted")
_STASH = "attach-info.json"
_CONTROLLER = ("CREATE_DELETE_VOLUME", "PUBLISH_UNPUBLISH_VOLUME", "EXPAND_VOLUME")
_NODE = ("STAGE_UNSTAGE_VOLUME", "EXPAND_VOLUME", "GET_VOLUME_STATS")


class Cloud:
    """Its volumes, at the controller and at the node."""

    def __init__(self, state_dir: str, node_id: str) -> None:
        self.switches = Switches(state_dir)
        self._volumes = image_volumes.Volumes(state_dir)
        self._state = self._volumes.state
        self._node_id = node_id

    def CreateVolume(self, request: csi_pb2.CreateVolumeRequest) -> csi_pb2.CreateVolumeResponse:
        if not request.name:
            raise Refused(Code.INVALID_ARGUMENT, "Volume name not provided")
        image_volumes.check_capabilities(request.volume_capabilities)
        for key in request.parameters:
            if key not in _PARAMETERS and not key.startswith("csi.storage.k8s.io/"):
                raise Refused(
                    Code.INVALID_ARGUMENT, f"Invalid parameter key {key} for CreateVolume"
                )
        digest = hashlib.sha256(request.name.encode()).hexdigest()
        volume_id = f"/subscriptions/{digest}/providers/disks/".ljust(200, digest[0])
        return self._volumes.create(volume_id, request, {})

    def DeleteVolume(self, request: csi_pb2.DeleteVolumeRequest) -> csi_pb2.DeleteVolumeResponse:
        return self._volumes.delete(request.volume_id)

    def ValidateVolumeCapabilities(
        self, request: csi_pb2.ValidateVolumeCapabilitiesRequest
    ) -> csi_pb2.ValidateVolumeCapabilitiesResponse:
        answer = self._volumes.validate(request)
        if answer.HasField("confirmed"):
            answer.confirmed.volume_context.update(request.volume_context)
        return answer

    def ControllerPublishVolume(
        self, request: csi_pb2.ControllerPublishVolumeRequest
    ) -> csi_pb2.ControllerPublishVolumeResponse:
        with self._state.lock:
            known = self._state.get(request.volume_id)
            if not request.node_id:
                raise Refused(Code.INVALID_ARGUMENT, "Node ID not provided")
            image_volumes.check_capabilities([request.volume_capability])
            if request.node_id != self._node_id:
                raise Refused(Code.NOT_FOUND, f"Instance {request.node_id} not found")
            device = disks.attach(self._volumes.image(request.volume_id))
            known["attached"] = True
            self._state.save()
        return csi_pb2.ControllerPublishVolumeResponse(publish_context={"devicePath": device})

    def ControllerUnpublishVolume(
        self, request: csi_pb2.ControllerUnpublishVolumeRequest
    ) -> csi_pb2.ControllerUnpublishVolumeResponse:
        with self._state.lock:
            if not request.volume_id:
                raise Refused(Code.INVALID_ARGUMENT, "Volume ID not provided")
            known = self._state.volumes.get(request.volume_id)
            if known is not None:
                disks.detach(self._volumes.image(request.volume_id))
                known["attached"] = False
                self._state.save()
        return csi_pb2.ControllerUnpublishVolumeResponse()

    def ControllerExpandVolume(
        self, request: csi_pb2.ControllerExpandVolumeRequest
    ) -> csi_pb2.ControllerExpandVolumeResponse:
        return csi_pb2.ControllerExpandVolumeResponse(
            capacity_bytes=self._volumes.grow(request),
            node_expansion_required=not request.volume_capability.HasField("block"),
        )

    def NodeStageVolume(
        self, request: csi_pb2.NodeStageVolumeRequest
    ) -> csi_pb2.NodeStageVolumeResponse:
        staging = request.staging_target_path
        if not (request.volume_id and staging):
            raise Refused(Code.INVALID_ARGUMENT, "Volume ID or staging target not provided")
        image_volumes.check_capability(request.volume_capability)
        self._state.get(request.volume_id)
        needs_secret = self.switches.of("secrets") != "not needed"
        if needs_secret and request.secrets.get("token") != TOKEN:
            raise Refused(Code.INVALID_ARGUMENT, "node stage secret with a valid token is required")
        device = request.publish_context.get("devicePath", "")
        if not device or device != disks.device_of(self._volumes.image(request.volume_id)):
            raise Refused(Code.INVALID_ARGUMENT, f"Device path {device!r} is not the volume's")
        mount = request.volume_capability.mount
        if request.volume_capability.HasField("block"):
            with open(f"{staging}/{_STASH}", "w", encoding="utf-8") as file:
                json.dump({"device": device}, file)
        elif not disks.is_mounted(staging):
            disks.format_and_mount(device, staging, mount.fs_type, list(mount.mount_flags))
        return csi_pb2.NodeStageVolumeResponse()

    def NodeUnstageVolume(
        self, request: csi_pb2.NodeUnstageVolumeRequest
    ) -> csi_pb2.NodeUnstageVolumeResponse:
        if not (request.volume_id and request.staging_target_path):
            raise Refused(Code.INVALID_ARGUMENT, "Volume ID or staging target not provided")
        stash = f"{request.staging_target_path}/{_STASH}"
        if os.path.exists(stash):
            os.unlink(stash)
        disks.unmount_one(request.staging_target_path)
        return csi_pb2.NodeUnstageVolumeResponse()

    def NodePublishVolume(
        self, request: csi_pb2.NodePublishVolumeRequest
    ) -> csi_pb2.NodePublishVolumeResponse:
        if not (request.volume_id and request.target_path and request.staging_target_path):
            raise Refused(Code.INVALID_ARGUMENT, "Volume ID, staging or target path not provided")
        image_volumes.check_capability(request.volume_capability)
        self._state.get(request.volume_id)
        if request.volume_capability.HasField("block"):
            self._publish_device(request)
        elif not disks.is_mounted(request.target_path):
            if not disks.is_mounted(request.staging_target_path):
                raise Refused(Code.FAILED_PRECONDITION, "Volume is not staged")
            os.makedirs(request.target_path, exist_ok=True)
            disks.run("mount", "--bind", request.staging_target_path, request.target_path)
            if request.readonly:
                disks.run("mount", "-o", "remount,bind,ro", request.target_path)
        return csi_pb2.NodePublishVolumeResponse()

    def _publish_device(self, request: csi_pb2.NodePublishVolumeRequest) -> None:
        if request.readonly:
            raise Refused(Code.INVALID_ARGUMENT, "read only not supported for Block Volume")
        try:
            with open(f"{request.staging_target_path}/{_STASH}", encoding="utf-8") as file:
                device = json.load(file)["device"]
        except FileNotFoundError:
            raise Refused(Code.FAILED_PRECONDITION, "Volume is not staged") from None
        badly = self.switches.of("NodePublishVolume")
        if badly == "directory":
            disks.format_and_mount(device, request.target_path, "", [])
        elif badly == "no device":
            os.close(os.open(request.target_path, os.O_CREAT | os.O_WRONLY, 0o600))
        elif badly != "nothing":
            spare = badly.removeprefix("device ") if badly.startswith("device ") else device
            disks.bind_device(spare, request.target_path)

    def NodeUnpublishVolume(
        self, request: csi_pb2.NodeUnpublishVolumeRequest
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        target = request.target_path
        if not (request.volume_id and target):
            raise Refused(Code.INVALID_ARGUMENT, "Volume ID or target path not provided")
        disks.unmount_one(target)
        if disks.is_mounted(target):
            raise Refused(Code.INTERNAL, "failed to cleanup mount point")
        if os.path.isdir(target):
            os.rmdir(target)
        elif os.path.lexists(target):
            os.unlink(target)
        return csi_pb2.NodeUnpublishVolumeResponse()

    def NodeGetVolumeStats(
        self, request: csi_pb2.NodeGetVolumeStatsRequest
    ) -> csi_pb2.NodeGetVolumeStatsResponse:
        path = request.volume_path
        if not (request.volume_id and path):
            raise Refused(Code.INVALID_ARGUMENT, "Volume ID or path not provided")
        self._state.get(request.volume_id)
        if not os.path.exists(path) or not disks.is_mounted(path):
            raise Refused(Code.NOT_FOUND, f"path {path} does not exist")
        answer = csi_pb2.NodeGetVolumeStatsResponse()
        bytes_unit, inodes_unit = csi_pb2.VolumeUsage.BYTES, csi_pb2.VolumeUsage.INODES
        if disks.is_device(path) and self.switches.of("NodeGetVolumeStats") != "devtmpfs":
            answer.usage.add(unit=bytes_unit, total=disks.size_of(path))
            return answer
        seen = os.statvfs(path)
        block = seen.f_frsize
        answer.usage.add(
            unit=bytes_unit,
            total=seen.f_blocks * block,
            available=seen.f_bavail * block,
            used=(seen.f_blocks - seen.f_bfree) * block,
        )
        answer.usage.add(
            unit=inodes_unit,
            total=seen.f_files,
            available=seen.f_ffree,
            used=seen.f_files - seen.f_ffree,
        )
        return answer

    def NodeExpandVolume(
        self, request: csi_pb2.NodeExpandVolumeRequest
    ) -> csi_pb2.NodeExpandVolumeResponse:
        path = request.volume_path
        if not (request.volume_id and path):
            raise Refused(Code.INVALID_ARGUMENT, "Volume ID or path not provided")
        known = self._state.get(request.volume_id)
        if not os.path.exists(path) or not disks.is_mounted(path):
            raise Refused(Code.NOT_FOUND, f"path {path} does not exist")
        device = disks.device_of(self._volumes.image(request.volume_id))
        disks.rescan(device)
        if not disks.is_device(path):
            disks.grow(device, path)
        return csi_pb2.NodeExpandVolumeResponse(capacity_bytes=known["size"])


def main() -> None:
    """Serve."""
    given = Arguments.parse()
    driver = Cloud(given.state_dir, given.node_id)
    plugin = Plugin(NAME, "7.1", given.node_id, _CONTROLLER, _NODE, max_volumes=20)
    serve(given.socket, driver.switches, plugin, driver)


if __name__ == "__main__":
    main()
