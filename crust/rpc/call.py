"""One call, served or made: its method and request, the metadata of request and answer, its fields.

Every log line about the call has its fields: the request id, the driver, the volume and the target. The first process
of crust that gets the call makes the id, and sends it on as gRPC metadata, as it does with the trace. The other
fields come from the request when the call begins.
"""

import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message

from crust.core import errors, logs, traces
from crust.wire.csi.v1 import csi_pb2
from crust.wire.pluginregistration.v1 import api_pb2
from crust.wire.v1 import handlers_pb2, inspect_pb2, pool_pb2, runtime_pb2

Metadata = tuple[tuple[str, str | bytes], ...]

ID_KEY = "crust-request-id"
VOLUME_KEY = "crust-volume-bin"
"""The driver and the volume's id, for a peer whose requests have the target alone: a runtime handler."""

_HOP_BY_HOP = ("user-agent", "grpc-accept-encoding", "accept-encoding")
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
"""Field of a request to key of a log line; the first set field of a key counts."""


@dataclass(eq=False, slots=True)
class Call:
    """A call of `method` (`/csi.v1.Node/NodeStageVolume`) with the metadata of its caller, who waits `timeout` s.

    `begun` gets the metadata before the answer; without it the caller reads `initial`. `wait_for_ready`: the caller
    waits for an absent peer.
    """

    method: str
    metadata: Metadata = ()
    """The caller's metadata, without that of its connection."""
    timeout: float | None = None
    begun: Callable[[Metadata], Awaitable[None]] | None = None
    wait_for_ready: bool = field(default=False, kw_only=True)
    initial: Metadata = field(default=(), init=False)
    trailing: Metadata = field(default=(), init=False)
    """The metadata after the answer."""
    _began_s: float = field(default_factory=time.monotonic, init=False)

    def time_remaining(self) -> float | None:
        """The time that the caller still waits, in seconds; None: without a limit."""
        if self.timeout is None:
            return None
        return max(0.0, self._began_s + self.timeout - time.monotonic())

    def onward(self) -> Mapping[str, Any]:
        """The arguments of a call for this call, beside its request: the metadata, and the remaining time."""
        return {"metadata": self.metadata, "timeout": self.time_remaining()}

    async def begin(self, initial: Metadata = ()) -> None:
        """Tell the caller that its call has begun, before the first answer."""
        self.initial = initial
        if self.begun is not None:
            await self.begun(initial)


def pairs(metadata: Any) -> Metadata:
    """gRPC's metadata without that of a connection."""
    return tuple((key, value) for key, value in metadata or () if key not in _HOP_BY_HOP)


def fields_of(request: Message | None, driver: str = "", metadata: Metadata = ()) -> dict[str, str]:
    """The fields of a call, by the keys of a log line. No code changes them: a thread may be writing a line."""
    fields, request_id = dict[str, str](), ""
    for key, value in metadata:
        if key == ID_KEY and isinstance(value, str) and _ID.fullmatch(value):
            request_id = value
        elif key == VOLUME_KEY and isinstance(value, bytes):
            named = value.decode("utf-8", "replace")
            fields["driver"], _, fields["volume_id"] = named.partition("\0")
    if driver:
        fields.setdefault("driver", driver)
    request_fields = {} if request is None else request.DESCRIPTOR.fields_by_name
    for name, key in _FIELDS.items():
        if name in request_fields and key not in fields:
            value = getattr(request, name)
            if value and isinstance(value, str):
                fields[key] = value[:_TEXT_MAX]
    fields["request_id"] = request_id or secrets.token_hex(6)
    return fields


def add_fields(**added: str) -> None:
    """Add fields that the request does not have to the log line of the served call."""
    fields = logs.context.get()
    if fields is not None:
        logs.context.set({**fields, **added})


def volume_metadata() -> Metadata:
    """The volume of the served call, for a peer that gets only its target."""
    fields = logs.context.get() or {}
    if "volume_id" not in fields:
        return ()
    named = f"{fields.get('driver', '')}\0{fields['volume_id']}"
    return ((VOLUME_KEY, named.encode()),)


def identified(metadata: Metadata) -> Metadata:
    """The metadata with the id and the span of the served call; unchanged outside of a call."""
    fields = logs.context.get()
    if fields is None or "request_id" not in fields:
        return metadata
    added = {ID_KEY: fields["request_id"]}
    if span := traces.traceparent():
        added[traces.KEY] = span
    others = (pair for pair in metadata if pair[0] not in added)
    return (*others, *added.items())


@cache
def methods() -> Mapping[str, MethodDescriptor]:
    """The methods of CSI, of crust and of a kubelet, by full name (`/csi.v1.Node/NodeStageVolume`)."""
    files = (csi_pb2, runtime_pb2, handlers_pb2, inspect_pb2, pool_pb2, api_pb2)
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
    return {
        f"/{service.full_name}/{method.name}": method
        for service in services
        for method in service.methods
    }


def parse(method: str, data: bytes) -> Any:
    """The request of a call, with its unknown fields; None if its method is not known.

    Raises `MalformedMessage`.
    """
    rpc = methods().get(method)
    if rpc is None:
        return None
    try:
        return message_factory.GetMessageClass(rpc.input_type).FromString(data)
    except DecodeError as err:
        raise errors.InvalidRequest.named(
            "MalformedMessage",
            f"the request cannot be parsed as {rpc.input_type.full_name}",
            why="its bytes are not a valid protobuf message",
        ) from err


def identity_of(request: Message) -> bytes:
    """The identity of a request: its fields without the secrets, which may be renewed."""
    plain = request
    if getattr(request, "secrets", None):
        plain = type(request)()
        plain.CopyFrom(request)
        plain.ClearField("secrets")
    return plain.SerializeToString(deterministic=True)
