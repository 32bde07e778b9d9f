"""A driver that conforms to CSI and uses every freedom that CSI leaves, as the public host-path driver does.

Its volumes are directories of one large filesystem: they have no size of their own, and any filesystem is as good as
another. It has no raw block volumes. It answers NOT_FOUND to an undo for a volume that it does not know, takes names,
parameters and maps of any kind, deletes what is in use, lets every target have every volume, keeps no list free of
what changes meanwhile, and makes files beside its socket.
"""

import hashlib
from pathlib import Path
from typing import Any

from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers.fake_driver import FakeDriver
from tests.support.memory_csi.host import MemoryHost
from tests.support.memory_csi.state import Code, Failure

SHARED_BYTES = 1 << 40
_UNDOES = {"NodeUnpublishVolume", "NodeUnstageVolume"}
_MAPS = ("parameters", "mutable_parameters", "volume_context", "publish_context")


class AcceptingDriver(FakeDriver):
    """Accepts, and does, what a strict driver refuses: maps and mount flags of any kind, unknown topologies."""

    def find(self, method: str) -> Any:
        strict = super().find(method)
        return lambda request: self.accept(method, strict, request)

    def accept(self, method: str, strict: Any, request: Any) -> Any:
        """The answer to a request, of which the strict driver sees what it takes."""
        asked = _simplified(request)
        if method == "CreateVolume":
            asked.ClearField("accessibility_requirements")
        return strict(asked)


class PermissiveDriver(AcceptingDriver):
    """Without what is alpha, and without raw block volumes, topology, groups and changed blocks."""

    def __init__(self) -> None:
        super().__init__("1.12", {"lock-beside-socket", "token-is-index"})
        self.plugin = self.plugin[:1]
        self.controller_rpcs = [1, 2, 3, 4, 5, 6, 7, 9, 11, 12]
        self.node_rpcs = [1, 2, 3, 4]
        self.defers = self.node_info = False

    def find(self, method: str) -> Any:
        if method.startswith("Group"):
            raise Failure(Code.UNIMPLEMENTED, f"{method} is not served")
        return super().find(method)

    def accept(self, method: str, strict: Any, request: Any) -> Any:
        asked = _simplified(request)
        if answer := self._freely(method, asked):
            return answer[0]
        answer = self._loosely(method, request, strict(asked))
        placed = {"NodeGetInfo": answer, "CreateVolume": getattr(answer, "volume", None)}.get(
            method
        )
        if placed is not None:
            placed.ClearField("accessible_topology")
        return answer

    def _freely(self, method: str, asked: Any) -> tuple[Any] | None:
        """What it answers without looking closer."""
        if method in _UNDOES and asked.volume_id and asked.volume_id not in self.state.volumes:
            path = (
                asked.target_path if method == "NodeUnpublishVolume" else asked.staging_target_path
            )
            if path:
                raise Failure(Code.NOT_FOUND, "no such volume")
        if method == "NodePublishVolume" and asked.target_path in self.published:
            return (_response(asked),)
        if method == "CreateVolume" and any(
            capability.HasField("block") for capability in asked.volume_capabilities
        ):
            raise Failure(Code.INVALID_ARGUMENT, "no raw block volumes")
        if method == "DeleteVolume" and asked.volume_id in self.state.volumes:
            self.state.volumes.pop(asked.volume_id)
            return (_response(asked),)
        return None

    def _loosely(self, method: str, request: Any, answer: Any) -> Any:
        if method == "NodeGetVolumeStats":
            for usage in answer.usage:
                usage.total, usage.available = SHARED_BYTES, SHARED_BYTES // 2
        if method == "NodeExpandVolume":
            answer.ClearField("capacity_bytes")
        if method == "ListVolumes":
            for entry in answer.entries:
                entry.status.published_node_ids[:] = ["node-1"]
                entry.status.volume_condition.message = "healthy"
        if method == "ValidateVolumeCapabilities":
            answer.confirmed.ClearField("volume_context")
            answer.confirmed.volume_capabilities.clear()
            answer.confirmed.volume_capabilities.extend(request.volume_capabilities)
        return answer


class SharedHost(MemoryHost):
    """Every filesystem is the one that holds all volumes."""

    def size_bytes(self, path: Path) -> int:
        return SHARED_BYTES


def _simplified(request: Any) -> Any:
    """The request, in which the values that it does not look at are those that the strict driver takes."""
    asked = type(request)()
    asked.CopyFrom(request)
    fields = asked.DESCRIPTOR.fields_by_name
    for name in set(_MAPS) & set(fields):
        asked.ClearField(name)
    if "name" in fields and asked.name:
        asked.name = hashlib.sha256(asked.name.encode()).hexdigest()
    if "max_entries" in fields:
        asked.max_entries = max(0, asked.max_entries)
    for capability in asked.volume_capabilities if "volume_capabilities" in fields else ():
        _any_filesystem(capability)
    if "volume_capability" in fields and asked.HasField("volume_capability"):
        _any_filesystem(asked.volume_capability)
    return asked


def _any_filesystem(capability: Any) -> None:
    if capability.HasField("mount"):
        capability.mount.Clear()
        capability.mount.SetInParent()


def _response(request: Any) -> Any:
    """The empty answer to a request."""
    return getattr(csi_pb2, request.DESCRIPTOR.name.replace("Request", "Response"))()
