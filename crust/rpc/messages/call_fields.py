"""What every log line about a call names: its request id, the driver, the volume and the target.

The id is made by the first process of crust that a call reaches, and travels to the next ones as gRPC metadata
(`port`). Everything else is read from the request when the call begins. The request, which may have secrets, is not
kept.
"""

import copy
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message

from crust.core import logs
from crust.wire.csi.v1 import csi_pb2
from crust.wire.v1 import handlers_pb2, inspect_pb2, pool_pb2, runtime_pb2

ID_KEY = "crust-request-id"
VOLUME_KEY = "crust-volume-bin"
"""The driver and the volume's id, for a peer whose requests have the target alone: a runtime handler."""

_ID = re.compile(r"[0-9A-Za-z-]{1,64}")
_TEXT_MAX = 256
_FIELDS = {
    "volume_id": "volume_id",
    "source_volume_id": "volume_id",
    "name": "volume_name",
    "snapshot_id": "snapshot_id",
    "group_snapshot_id": "group_snapshot_id",
    "target_path": "target",
    "volume_path": "target",
    "volume_target_path": "target",
    "volume_publish_path": "target",
    "staging_target_path": "target",
}
"""Field of a request to key of a log line; the first one that is set is taken."""


class CallFields(dict[str, str]):
    """The fields of one call, by the keys of a log line. They never change: a thread may be writing a line."""

    def __init__(
        self,
        method: str,
        request: Message | bytes,
        driver: str = "",
        metadata: Iterable[tuple[str, str | bytes]] = (),
    ) -> None:
        request_id = ""
        for key, value in metadata:
            if key == ID_KEY and isinstance(value, str) and _ID.fullmatch(value):
                request_id = value
            elif key == VOLUME_KEY and isinstance(value, bytes):
                name, _, volume_id = value.decode("utf-8", "replace").partition("\0")
                self.update(driver=name, volume_id=volume_id)
        if driver:
            self.setdefault("driver", driver)
        message = decoded(method, request) if isinstance(request, bytes) else request
        if message is not None:
            _read(message, self)
        self["request_id"] = request_id or secrets.token_hex(6)

    @property
    def request_id(self) -> str:
        """The id of the call."""
        return self["request_id"]


def name_volume(driver: str, volume_id: str) -> None:
    """Name the volume of the call that is being served, whose request has the target alone."""
    fields = current()
    if fields is not None:
        named = copy.copy(fields)
        named.update(driver=driver, volume_id=volume_id)
        logs.context.set(named)


def _read(request: Message, into: dict[str, str]) -> None:
    known = request.DESCRIPTOR.fields_by_name
    for field, key in _FIELDS.items():
        if field in known and key not in into:
            value = getattr(request, field)
            if value and isinstance(value, str):
                into[key] = value[:_TEXT_MAX]


def current() -> CallFields | None:
    """The fields of the call that is being served."""
    fields = logs.context.get()
    return fields if isinstance(fields, CallFields) else None


def decoded(method: str, request: bytes) -> Message | None:
    """The request of a call; None if it is not one of CSI or crust."""
    kind = _kinds().get(method)
    if kind is None:
        return None
    try:
        message: Message = kind.FromString(request)
    except DecodeError:
        return None
    return message


def is_known(method: str) -> bool:
    """Whether a method is one of CSI, or of crust."""
    return method in _kinds()


def is_unary(method: str) -> bool:
    """Whether a method is one of CSI, or of crust, that has one request and one answer."""
    return method in _unary_methods()


def _methods() -> Iterator[tuple[str, MethodDescriptor]]:
    """Each method by its full name (`/csi.v1.Node/NodeStageVolume`)."""
    for file in (csi_pb2, runtime_pb2, handlers_pb2, inspect_pb2, pool_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield f"/{service.full_name}/{method.name}", method


@cache
def _kinds() -> Mapping[str, Any]:
    """The request of each method."""
    return {name: message_factory.GetMessageClass(each.input_type) for name, each in _methods()}


@cache
def _unary_methods() -> frozenset[str]:
    return frozenset(
        name for name, each in _methods() if not (each.client_streaming or each.server_streaming)
    )
