"""A CSI driver in 100 lines: sparse files on loop devices, mounted on the host or deferred to a guest.

mini_driver.py CSI_SOCKET POOL
"""

import os
import subprocess
import sys
from concurrent import futures
from typing import Any

import grpc

from crust.csi_shim import library
from crust.wire.csi.v1 import csi_pb2 as csi  # or your own generated code, of any CSI 1.x
from crust.wire.csi.v1 import csi_pb2_grpc as services

CODE = grpc.StatusCode
CREATE_DELETE = csi.ControllerServiceCapability.RPC.CREATE_DELETE_VOLUME
STAGE = csi.NodeServiceCapability.RPC.STAGE_UNSTAGE_VOLUME
CONTROLLER = csi.PluginCapability.Service.CONTROLLER_SERVICE
DEFAULT_SIZE = 32 << 20


def sh(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


class Images:
    def __init__(self, pool: str) -> None:
        self.pool = pool

    def path(self, volume_id: str) -> str:
        return f"{self.pool}/{volume_id}.img"

    def exists(self, volume_id: str) -> bool:
        return "/" not in volume_id and os.path.exists(self.path(volume_id))

    def device(self, volume_id: str) -> str:
        return sh("losetup", "--noheadings", "-O", "NAME", "-j", self.path(volume_id))


class Identity(services.IdentityServicer):
    def GetPluginInfo(self, request: Any, context: Any) -> Any:
        return csi.GetPluginInfoResponse(name="mini.csi.example", vendor_version="1")

    def GetPluginCapabilities(self, request: Any, context: Any) -> Any:
        answer = csi.GetPluginCapabilitiesResponse()
        answer.capabilities.add().service.type = CONTROLLER
        return answer

    def Probe(self, request: Any, context: Any) -> Any:
        return csi.ProbeResponse()


class Controller(services.ControllerServicer):
    def __init__(self, images: Images) -> None:
        self.images = images

    def ControllerGetCapabilities(self, request: Any, context: Any) -> Any:
        answer = csi.ControllerGetCapabilitiesResponse()
        answer.capabilities.add().rpc.type = CREATE_DELETE
        return answer

    def CreateVolume(self, request: Any, context: Any) -> Any:
        volume_id = f"v-{request.name.encode().hex()[:200]}"
        path, wanted = self.images.path(volume_id), request.capacity_range.required_bytes
        size = -(-(wanted or DEFAULT_SIZE) // 4096) * 4096
        if not os.path.exists(path):
            with open(f"{path}~", "wb") as file:
                file.truncate(size)
            sh("mkfs.ext4", "-q", f"{path}~")
            os.rename(f"{path}~", path)
        if os.path.getsize(path) != size:
            context.abort(CODE.ALREADY_EXISTS, "it exists with another size")
        volume = csi.Volume(volume_id=volume_id, capacity_bytes=size)
        volume.volume_context.update(request.parameters)  # crust.dev/defer of the StorageClass
        return csi.CreateVolumeResponse(volume=volume)

    def DeleteVolume(self, request: Any, context: Any) -> Any:
        if self.images.exists(request.volume_id):
            if self.images.device(request.volume_id):
                context.abort(CODE.FAILED_PRECONDITION, "it is staged")
            os.remove(self.images.path(request.volume_id))
        return csi.DeleteVolumeResponse()


class Node(services.NodeServicer):
    def __init__(self, images: Images) -> None:
        self.images = images

    def NodeGetInfo(self, request: Any, context: Any) -> Any:
        return csi.NodeGetInfoResponse(node_id=os.uname().nodename)

    def NodeGetCapabilities(self, request: Any, context: Any) -> Any:
        mine = csi.NodeGetCapabilitiesResponse()
        mine.capabilities.add().rpc.type = STAGE
        return library.capabilities(context, mine, group=True)

    def NodeStageVolume(self, request: Any, context: Any) -> Any:
        if not self.images.exists(request.volume_id):
            context.abort(CODE.NOT_FOUND, f"there is no volume {request.volume_id!r}")
        if not self.images.device(request.volume_id):
            sh("losetup", "--find", self.images.path(request.volume_id))
        return csi.NodeStageVolumeResponse()

    def NodeUnstageVolume(self, request: Any, context: Any) -> Any:
        if device := self.images.device(request.volume_id):
            sh("losetup", "--detach", device)
        return csi.NodeUnstageVolumeResponse()

    def NodePublishVolume(self, request: Any, context: Any) -> Any:
        device = self.images.device(request.volume_id)
        if not device:
            context.abort(CODE.FAILED_PRECONDITION, "it is not staged")
        if library.is_deferred(request):  # mount nothing: describe the guest's mount
            return library.deferred_mount(device, "ext4", request)
        os.makedirs(request.target_path, exist_ok=True)
        if not os.path.ismount(request.target_path):
            sh("mount", "-o", "ro" if request.readonly else "rw", device, request.target_path)
        return csi.NodePublishVolumeResponse()

    def NodeUnpublishVolume(self, request: Any, context: Any) -> Any:
        if os.path.ismount(request.target_path):
            sh("umount", request.target_path)
        if os.path.isdir(request.target_path):
            os.rmdir(request.target_path)
        return csi.NodeUnpublishVolumeResponse()


def main(socket: str, pool: str) -> None:
    server, images = grpc.server(futures.ThreadPoolExecutor(8)), Images(pool)
    services.add_IdentityServicer_to_server(Identity(), server)
    services.add_ControllerServicer_to_server(Controller(images), server)  # type: ignore[abstract]
    services.add_NodeServicer_to_server(Node(images), server)  # type: ignore[abstract]
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main(*sys.argv[1:3])
