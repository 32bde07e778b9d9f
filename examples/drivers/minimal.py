"""The smallest driver: volumes, and a publish that attaches and binds or mounts. No stage, attach, growth, numbers.

A raw device that is published again goes on top; an unpublish takes one layer off, answers OK, and leaves the target
file. Parameters that it does not know are ignored, and so is `readonly` of a raw device.
"""

import os
import threading
import uuid

from crust.wire.csi.v1 import csi_pb2
from examples.drivers import disks, image_volumes
from examples.drivers.serving import Arguments, Code, Plugin, Refused, Switches, serve

NAME = "minimal.csi.example.org"


class Minimal:
    """Its volumes, at the controller and at the node."""

    def __init__(self, state_dir: str) -> None:
        self.switches = Switches(state_dir)
        self._volumes = image_volumes.Volumes(state_dir)
        self._one_at_a_time = threading.Lock()

    def CreateVolume(self, request: csi_pb2.CreateVolumeRequest) -> csi_pb2.CreateVolumeResponse:
        if not request.name:
            raise Refused(Code.INVALID_ARGUMENT, "no name")
        image_volumes.check_capabilities(request.volume_capabilities)
        volume_id = str(uuid.uuid5(uuid.NAMESPACE_URL, request.name))
        return self._volumes.create(volume_id, request, {})

    def DeleteVolume(self, request: csi_pb2.DeleteVolumeRequest) -> csi_pb2.DeleteVolumeResponse:
        return self._volumes.delete(request.volume_id)

    def ValidateVolumeCapabilities(
        self, request: csi_pb2.ValidateVolumeCapabilitiesRequest
    ) -> csi_pb2.ValidateVolumeCapabilitiesResponse:
        return self._volumes.validate(request)

    def NodePublishVolume(
        self, request: csi_pb2.NodePublishVolumeRequest
    ) -> csi_pb2.NodePublishVolumeResponse:
        target = request.target_path
        if not (request.volume_id and target):
            raise Refused(Code.INVALID_ARGUMENT, "no volume or no target")
        image_volumes.check_capability(request.volume_capability)
        self._volumes.state.get(request.volume_id)
        with self._one_at_a_time:  # a call that was cancelled may still run beside its retry
            self._publish(request)
        return csi_pb2.NodePublishVolumeResponse()

    def _publish(self, request: csi_pb2.NodePublishVolumeRequest) -> None:
        target = request.target_path
        device = disks.attach(self._volumes.image(request.volume_id))
        badly = self.switches.of("NodePublishVolume")
        mount = request.volume_capability.mount
        if badly == "no device":
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
        elif request.volume_capability.HasField("block") and badly != "directory":
            disks.bind_device(device, target)
        elif not disks.is_mounted(target):
            flags = [*mount.mount_flags, *(["ro"] if request.readonly else [])]
            disks.format_and_mount(device, target, mount.fs_type, flags)

    def NodeUnpublishVolume(
        self, request: csi_pb2.NodeUnpublishVolumeRequest
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        target = request.target_path
        if not (request.volume_id and target):
            raise Refused(Code.INVALID_ARGUMENT, "no volume or no target")
        with self._one_at_a_time:
            self._unpublish(target, self._volumes.image(request.volume_id))
        return csi_pb2.NodeUnpublishVolumeResponse()

    def _unpublish(self, target: str, image: str) -> None:
        disks.unmount_one(target)
        if os.path.isdir(target):
            os.rmdir(target)
        if os.path.exists(image):
            device = disks.device_of(image)
            if device and not disks.has_binds(device):
                disks.detach(image)


def main() -> None:
    """Serve."""
    given = Arguments.parse()
    driver = Minimal(given.state_dir)
    plugin = Plugin(NAME, "0.1", given.node_id, controller=("CREATE_DELETE_VOLUME",))
    serve(given.socket, driver.switches, plugin, driver)


if __name__ == "__main__":
    main()
