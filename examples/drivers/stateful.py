"""A driver that believes its own account of where each volume is, as the reference driver of Kubernetes does.

Its traps: the kind of access is fixed when a volume is created; a volume is staged at one path, and published only
from that path; an unstage while anything is published is an error; an unpublish where the account has nothing is OK,
also while something is mounted there; a used volume is neither detached nor deleted. The account outlives a reboot,
and mounts do not. Two more are of drivers of storage networks: the stage binds the device on a file in the staging
directory, and the publish binds that file without a check. An inline volume is made as a directory by its publish.
The node answers no size when it has grown a device. A clone has its source's size; a published raw device has none.
"""

import os
import shutil
import uuid
from typing import Any

from crust.wire.csi.v1 import csi_pb2
from examples.drivers import disks, image_volumes
from examples.drivers.serving import Arguments, Code, Plugin, Refused, Switches, serve

NAME = "stateful.csi.example.org"
_EPHEMERAL = "csi.storage.k8s.io/ephemeral"
_CONTROLLER = ("CREATE_DELETE_VOLUME", "PUBLISH_UNPUBLISH_VOLUME", "EXPAND_VOLUME", "CLONE_VOLUME")
_NODE = ("STAGE_UNSTAGE_VOLUME", "EXPAND_VOLUME", "GET_VOLUME_STATS")


class Stateful:
    """Its volumes, at the controller and at the node; one call at a time."""

    def __init__(self, state_dir: str, node_id: str) -> None:
        self.switches = Switches(state_dir)
        self._dir = state_dir
        self._volumes = image_volumes.Volumes(state_dir)
        self._state = self._volumes.state
        self._node_id = node_id

    def CreateVolume(self, request: csi_pb2.CreateVolumeRequest) -> csi_pb2.CreateVolumeResponse:
        kinds = {capability.WhichOneof("access_type") for capability in request.volume_capabilities}
        if not request.name or len(kinds) != 1:
            raise Refused(Code.INVALID_ARGUMENT, "cannot have both block and mount access type")
        volume_id = str(uuid.uuid5(uuid.NAMESPACE_URL, request.name))
        kind, source = kinds.pop(), request.volume_content_source.volume.volume_id
        with self._state.lock:
            made = self._state.volumes.get(volume_id)
            if made is not None and source != made["source"]:
                raise Refused(Code.ALREADY_EXISTS, f"{request.name} has another source")
            if made is None and source:
                self._copy(source, volume_id, kind, request.capacity_range)
            answer = self._volumes.create(volume_id, request, dict(request.parameters))
            known = self._state.get(volume_id)
            known.setdefault("kind", kind)
            known.setdefault("source", source)
            known.setdefault("staged", [])
            known.setdefault("published", [])
            self._state.save()
        if source:
            answer.volume.content_source.CopyFrom(request.volume_content_source)
        return answer

    def _copy(
        self, source: str, volume_id: str, kind: str | None, wanted: csi_pb2.CapacityRange
    ) -> None:
        """Copy the bytes, before there is a volume: a retry copies again."""
        known = self._state.get(source)
        size = known["size"]
        if wanted.required_bytes not in (0, size) or 0 < wanted.limit_bytes < size:
            raise Refused(Code.OUT_OF_RANGE, f"a clone has the size of its source, {size}")
        if kind != known["kind"]:
            raise Refused(Code.INVALID_ARGUMENT, f"the source is a {known['kind']} volume")
        if kind == "block" and known["published"]:
            raise Refused(Code.FAILED_PRECONDITION, f"Volume {source} is written by its users")
        images = self._volumes.image(source), self._volumes.image(volume_id)
        disks.run("cp", "--sparse=always", *images)
        if os.path.isdir(self._tree(source)):
            shutil.copytree(self._tree(source), self._tree(volume_id), dirs_exist_ok=True)
        wanted.required_bytes = size

    def DeleteVolume(self, request: csi_pb2.DeleteVolumeRequest) -> csi_pb2.DeleteVolumeResponse:
        with self._state.lock:
            known = self._state.volumes.get(request.volume_id)
            if known is not None:
                self._check_unused(request.volume_id, known)
            return self._volumes.delete(request.volume_id)

    def ValidateVolumeCapabilities(
        self, request: csi_pb2.ValidateVolumeCapabilitiesRequest
    ) -> csi_pb2.ValidateVolumeCapabilitiesResponse:
        return self._volumes.validate(request)

    def ControllerPublishVolume(
        self, request: csi_pb2.ControllerPublishVolumeRequest
    ) -> csi_pb2.ControllerPublishVolumeResponse:
        if request.node_id != self._node_id:
            raise Refused(Code.NOT_FOUND, f"not the node {self._node_id}")
        with self._state.lock:
            self._state.get(request.volume_id)["attached"] = True
            self._state.save()
        return csi_pb2.ControllerPublishVolumeResponse()

    def ControllerUnpublishVolume(
        self, request: csi_pb2.ControllerUnpublishVolumeRequest
    ) -> csi_pb2.ControllerUnpublishVolumeResponse:
        with self._state.lock:
            known = self._state.volumes.get(request.volume_id)
            if known is not None:
                self._check_unused(request.volume_id, known)
                known["attached"] = False
                self._state.save()
        return csi_pb2.ControllerUnpublishVolumeResponse()

    def ControllerExpandVolume(
        self, request: csi_pb2.ControllerExpandVolumeRequest
    ) -> csi_pb2.ControllerExpandVolumeResponse:
        return csi_pb2.ControllerExpandVolumeResponse(
            capacity_bytes=self._volumes.grow(request), node_expansion_required=True
        )

    def NodeStageVolume(
        self, request: csi_pb2.NodeStageVolumeRequest
    ) -> csi_pb2.NodeStageVolumeResponse:
        staging = request.staging_target_path
        with self._state.lock:
            known = self._state.get(request.volume_id)
            if not known.get("attached"):
                raise Refused(Code.FAILED_PRECONDITION, "ControllerPublishVolume must be called")
            if known["staged"] and staging not in known["staged"]:
                raise Refused(
                    Code.FAILED_PRECONDITION,
                    f"the volume is already staged at {known['staged'][0]}",
                )
            is_trusting = self.switches.of("NodeStageVolume") == "believe the account"
            if known["kind"] == "block" and not (known["staged"] and is_trusting):
                file = f"{staging}/{request.volume_id}"
                if not disks.is_mounted(file):
                    disks.bind_device(disks.attach(self._image(request)), file)
            known["staged"] = [staging]
            self._state.save()
        return csi_pb2.NodeStageVolumeResponse()

    def NodeUnstageVolume(
        self, request: csi_pb2.NodeUnstageVolumeRequest
    ) -> csi_pb2.NodeUnstageVolumeResponse:
        staging = request.staging_target_path
        with self._state.lock:
            known = self._state.get(request.volume_id)
            if staging in known["staged"]:
                if known["published"]:
                    raise Refused(
                        Code.INTERNAL, f"the volume is still published at {known['published'][0]}"
                    )
                if known["kind"] == "block":
                    file = f"{staging}/{request.volume_id}"
                    disks.unmount_one(file)
                    if os.path.lexists(file):
                        os.unlink(file)
                    disks.detach(self._image(request))
                known["staged"] = []
                self._state.save()
        return csi_pb2.NodeUnstageVolumeResponse()

    def NodePublishVolume(
        self, request: csi_pb2.NodePublishVolumeRequest
    ) -> csi_pb2.NodePublishVolumeResponse:
        with self._state.lock:
            is_inline = request.volume_context.get(_EPHEMERAL) == "true"
            if is_inline:
                inline = {"kind": "mount", "staged": [], "published": [], "inline": True}
                self._state.volumes.setdefault(request.volume_id, inline)
                self._state.save()
            known = self._state.get(request.volume_id)
            staging = request.staging_target_path
            if not is_inline and staging not in known["staged"]:
                where = known["staged"] or "nowhere"
                raise Refused(Code.FAILED_PRECONDITION, f"staged at {where}, not at {staging!r}")
            kind = request.volume_capability.WhichOneof("access_type")
            if kind != known["kind"]:
                raise Refused(
                    Code.INVALID_ARGUMENT,
                    f"cannot publish a {known['kind']} volume as {kind} volume",
                )
            if not disks.is_mounted(request.target_path):
                self._bind(request, kind)
            if request.target_path not in known["published"]:
                known["published"].append(request.target_path)
            self._state.save()
        return csi_pb2.NodePublishVolumeResponse()

    def _bind(self, request: csi_pb2.NodePublishVolumeRequest, kind: str | None) -> None:
        target, badly = request.target_path, self.switches.of("NodePublishVolume")
        if kind == "mount" or badly == "directory":
            os.makedirs(self._tree(request.volume_id), exist_ok=True)
            os.makedirs(target, exist_ok=True)
            disks.run("mount", "--bind", self._tree(request.volume_id), target)
        elif badly == "no device":
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
        else:  # an empty file, if the stage's mount is gone
            disks.bind_device(f"{request.staging_target_path}/{request.volume_id}", target)

    def NodeUnpublishVolume(
        self, request: csi_pb2.NodeUnpublishVolumeRequest
    ) -> csi_pb2.NodeUnpublishVolumeResponse:
        target = request.target_path
        with self._state.lock:
            known = self._state.get(request.volume_id)
            if target in known["published"]:
                disks.unmount_one(target)
                if os.path.isdir(target):
                    os.rmdir(target)
                elif os.path.lexists(target):
                    os.unlink(target)
                known["published"].remove(target)
                if known.get("inline"):
                    shutil.rmtree(self._tree(request.volume_id), ignore_errors=True)
                    del self._state.volumes[request.volume_id]
                self._state.save()
        return csi_pb2.NodeUnpublishVolumeResponse()

    def NodeGetVolumeStats(
        self, request: csi_pb2.NodeGetVolumeStatsRequest
    ) -> csi_pb2.NodeGetVolumeStatsResponse:
        self._state.get(request.volume_id)
        try:
            seen = os.statvfs(request.volume_path)  # of devtmpfs, for a raw device
        except OSError as error:
            raise Refused(Code.NOT_FOUND, str(error)) from None
        answer = csi_pb2.NodeGetVolumeStatsResponse()
        total, free = seen.f_blocks * seen.f_frsize, seen.f_bavail * seen.f_frsize
        unit = csi_pb2.VolumeUsage.BYTES
        answer.usage.add(unit=unit, total=total, available=free, used=total - free)
        return answer

    def NodeExpandVolume(
        self, request: csi_pb2.NodeExpandVolumeRequest
    ) -> csi_pb2.NodeExpandVolumeResponse:
        known, path = self._state.get(request.volume_id), request.volume_path
        is_right = disks.is_device(path) if known["kind"] == "block" else os.path.isdir(path)
        if not is_right:
            raise Refused(
                Code.INVALID_ARGUMENT, f"{path!r} is not what a {known['kind']} volume is"
            )
        if known["kind"] == "block":
            disks.rescan(disks.device_of(self._image(request)))
        return csi_pb2.NodeExpandVolumeResponse()

    def _image(self, request: Any) -> str:
        return self._volumes.image(request.volume_id)

    def _tree(self, volume_id: str) -> str:
        return f"{self._dir}/trees/{volume_id}"

    def _check_unused(self, volume_id: str, known: dict[str, Any]) -> None:
        if known["staged"] or known["published"]:
            raise Refused(Code.INTERNAL, f"Volume {volume_id} is still used: {known}")


def main() -> None:
    """Serve."""
    given = Arguments.parse()
    driver = Stateful(given.state_dir, given.node_id)
    name = driver.switches.of("name") or NAME
    plugin = Plugin(name, "1.17", given.node_id, _CONTROLLER, _NODE, max_volumes=20)
    serve(given.socket, driver.switches, plugin, driver)


if __name__ == "__main__":
    main()
