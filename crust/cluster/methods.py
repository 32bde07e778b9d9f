"""The calls that go to the node that has the pool, and what they are about: those of CSI, and one of ours.

Calls about one name or id are carried out one after the other, in the order in which they were put: `subject` is the
same for a volume's name and its id.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf import empty_pb2, struct_pb2
from google.protobuf.message import Message

from crust import pool_ids
from crust.wire.csi.v1 import csi_pb2

CHANGE_S = 120.0
LONG_S = 3600.0
READ_S = 30.0


@dataclass(frozen=True, slots=True)
class Method:
    """A call: its path, its messages, what it is about, and after how long nobody waits for it any more."""

    path: str
    request: type[Message]
    response: type[Message]
    subject: Callable[[Any], str]
    """Empty for a call that only reads."""
    limit_s: float
    is_stream: bool = False

    @property
    def name(self) -> str:
        """The name of the call."""
        return self.path.rpartition("/")[2]

    @property
    def creates(self) -> bool:
        """Whether the call makes what its name stands for."""
        return self.name.startswith("Create")

    @property
    def frees(self) -> bool:
        """Whether the node may have more free capacity after the call."""
        return self.name.startswith("Delete") or self.name == "ControllerUnpublishVolume"


def _none(request: Any) -> str:
    return ""


def _id(text: str) -> str:
    return pool_ids.key_of(text) or f"id {text}"


def _of_id(field: str) -> Callable[[Any], str]:
    return lambda request: _id(getattr(request, field))


def _named(kind: str) -> Callable[[Any], str]:
    return lambda request: pool_ids.name_key(kind, request.name)


def _methods() -> Iterator[Method]:
    changes = (
        ("CreateVolume", _named("volume"), LONG_S),
        ("DeleteVolume", _of_id("volume_id"), CHANGE_S),
        ("ControllerPublishVolume", _of_id("volume_id"), CHANGE_S),
        ("ControllerUnpublishVolume", _of_id("volume_id"), CHANGE_S),
        ("ControllerExpandVolume", _of_id("volume_id"), CHANGE_S),
        ("ControllerModifyVolume", _of_id("volume_id"), CHANGE_S),
        ("CreateSnapshot", _named("snapshot"), LONG_S),
        ("DeleteSnapshot", _of_id("snapshot_id"), CHANGE_S),
    )
    for name, subject, limit_s in changes:
        yield _method("Controller", name, subject, limit_s)
    for name in (
        "ValidateVolumeCapabilities",
        "ListVolumes",
        "GetCapacity",
        "ListSnapshots",
        "ControllerGetVolumeHealth",
        "ControllerListVolumeHealth",
        "ControllerGetNodeInfo",
    ):
        yield _method("Controller", name, _none, READ_S)
    # what tells whether a name stands waits behind a change of that name: one that runs may yet make it
    yield _method("Controller", "ControllerGetVolume", _of_id("volume_id"), READ_S)
    yield _method("Controller", "GetSnapshot", _of_id("snapshot_id"), READ_S)
    yield _method("GroupController", "CreateVolumeGroupSnapshot", _named("group"), LONG_S)
    group = _of_id("group_snapshot_id")
    yield _method("GroupController", "DeleteVolumeGroupSnapshot", group, CHANGE_S)
    yield _method("GroupController", "GetVolumeGroupSnapshot", group, READ_S)
    yield _method("SnapshotMetadata", "GetMetadataAllocated", _none, READ_S, is_stream=True)
    yield _method("SnapshotMetadata", "GetMetadataDelta", _none, READ_S, is_stream=True)


def _method(
    service: str,
    name: str,
    subject: Callable[[Any], str],
    limit_s: float,
    *,
    is_stream: bool = False,
) -> Method:
    request, response = (getattr(csi_pb2, f"{name}{kind}") for kind in ("Request", "Response"))
    return Method(f"/csi.v1.{service}/{name}", request, response, subject, limit_s, is_stream)


NAMES_UNDER_WAY = Method(
    "/crust.cluster/NamesUnderWay", empty_pb2.Empty, struct_pb2.ListValue, _none, READ_S
)
"""Answered by the agent: the names that it was asked to create and has not answered yet."""

METHODS = {each.path: each for each in (*_methods(), NAMES_UNDER_WAY)}
BY_NAME = {each.name: each for each in METHODS.values()}
