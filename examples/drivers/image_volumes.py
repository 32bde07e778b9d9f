"""The part of a controller that all of them have: volumes by name, of a size, each an image file."""

import hashlib
import os
from typing import Any

from crust.wire.csi.v1 import csi_pb2
from examples.drivers import disks
from examples.drivers.serving import Code, Refused, State

MIB = 1 << 20
MODE = csi_pb2.VolumeCapability.AccessMode


class Volumes:
    """The volumes of a driver: an image each."""

    def __init__(self, state_dir: str) -> None:
        os.makedirs(f"{state_dir}/disks", exist_ok=True)
        self._dir = state_dir
        self.state = State(f"{state_dir}/state.json")

    def image(self, volume_id: str) -> str:
        """The file of a volume."""
        return f"{self._dir}/disks/{hashlib.sha256(volume_id.encode()).hexdigest()[:24]}.img"

    def create(
        self, volume_id: str, request: csi_pb2.CreateVolumeRequest, context: dict[str, str]
    ) -> csi_pb2.CreateVolumeResponse:
        """A volume of that id."""
        wanted, limit = request.capacity_range.required_bytes, request.capacity_range.limit_bytes
        size = _rounded(wanted or 64 * MIB)
        if limit and size > limit:
            raise Refused(Code.OUT_OF_RANGE, f"the size {size} is above the limit {limit}")
        with self.state.lock:
            known = self.state.volumes.get(volume_id)
            if known is not None and not (
                known["size"] >= wanted and (not limit or known["size"] <= limit)
            ):
                raise Refused(Code.ALREADY_EXISTS, f"{request.name} exists with another size")
            if known is None:
                disks.make_image(self.image(volume_id), size)
                known = {"size": size, "context": context}
                self.state.volumes[volume_id] = known
                self.state.save()
        volume = csi_pb2.Volume(
            volume_id=volume_id, capacity_bytes=known["size"], volume_context=known["context"]
        )
        return csi_pb2.CreateVolumeResponse(volume=volume)

    def validate(
        self, request: csi_pb2.ValidateVolumeCapabilitiesRequest
    ) -> csi_pb2.ValidateVolumeCapabilitiesResponse:
        """Confirmed if the driver supports them."""
        self.state.get(request.volume_id)
        answer = csi_pb2.ValidateVolumeCapabilitiesResponse()
        if not request.volume_capabilities:
            raise Refused(Code.INVALID_ARGUMENT, "Volume capabilities not provided")
        try:
            check_capabilities(request.volume_capabilities)
        except Refused as refused:
            answer.message = str(refused)
            return answer
        answer.confirmed.volume_capabilities.extend(request.volume_capabilities)
        return answer

    def delete(self, volume_id: str) -> csi_pb2.DeleteVolumeResponse:
        """Forget it, and its bytes."""
        with self.state.lock:
            if not volume_id:
                raise Refused(Code.INVALID_ARGUMENT, "Volume ID not provided")
            known = self.state.volumes.get(volume_id)
            if known is not None:
                if known.get("attached"):
                    raise Refused(Code.FAILED_PRECONDITION, "Volume is still attached")
                disks.detach(self.image(volume_id))
                os.unlink(self.image(volume_id))
                del self.state.volumes[volume_id]
                self.state.save()
        return csi_pb2.DeleteVolumeResponse()

    def grow(self, request: csi_pb2.ControllerExpandVolumeRequest) -> int:
        """Grow the image."""
        with self.state.lock:
            known = self.state.get(request.volume_id)
            wanted = _rounded(request.capacity_range.required_bytes)
            limit = request.capacity_range.limit_bytes
            if not wanted:
                raise Refused(Code.INVALID_ARGUMENT, "Capacity range not provided")
            if limit and max(wanted, known["size"]) > limit:
                raise Refused(Code.OUT_OF_RANGE, "the size is above the limit")
            known["size"] = max(wanted, known["size"])
            disks.make_image(self.image(request.volume_id), known["size"])
            self.state.save()
            return int(known["size"])


def check_capabilities(capabilities: Any) -> None:
    """Several nodes may write a raw device, and no filesystem."""
    if not len(capabilities):
        raise Refused(Code.INVALID_ARGUMENT, "Volume capabilities not provided")
    for capability in capabilities:
        check_capability(capability)


def check_capability(capability: csi_pb2.VolumeCapability) -> None:
    """The same of one."""
    kind = capability.WhichOneof("access_type")
    if kind is None:
        raise Refused(Code.INVALID_ARGUMENT, "Volume capability has no access type")
    single = (MODE.SINGLE_NODE_WRITER, MODE.SINGLE_NODE_READER_ONLY)
    many = (MODE.MULTI_NODE_MULTI_WRITER, MODE.MULTI_NODE_READER_ONLY)
    if capability.access_mode.mode not in (*single, *(many if kind == "block" else ())):
        raise Refused(Code.INVALID_ARGUMENT, "Volume capability is not supported")


def _rounded(size: int) -> int:
    return (size + MIB - 1) // MIB * MIB
