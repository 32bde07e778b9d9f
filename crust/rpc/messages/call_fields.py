"""What every log line about a call names: its request id, the driver, the volume and the target.

The id is made by the first process of crust that a call reaches, and travels to the next ones as gRPC metadata
(`port`). Everything else is read from the request, once, when the first line is written or the call ends: most calls
write one line. From then on the request, which may have secrets, is not kept.
"""

import re
import secrets
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping
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


class CallFields(Mapping[str, str]):
    """The fields of one call, by the keys of a log line."""

    def __init__(
        self,
        method: str,
        request: object,
        driver: Callable[[], str] = lambda: "",
        metadata: Iterable[tuple[str, str | bytes]] | None = None,
    ) -> None:
        self._method = method
        self._request = request
        self._driver = driver
        self._found: dict[str, str] = {}
        self.request_id = ""
        for key, value in metadata or ():
            if key == ID_KEY and isinstance(value, str) and _ID.fullmatch(value):
                self.request_id = value
            elif key == VOLUME_KEY and isinstance(value, bytes):
                name, _, volume_id = value.decode("utf-8", "replace").partition("\0")
                self._found |= {"driver": name, "volume_id": volume_id}
        self.request_id = self._found["request_id"] = self.request_id or secrets.token_hex(6)

    def name_volume(self, driver: str, volume_id: str) -> None:
        """Name the volume of a request that has the target alone."""
        self._found = {**self._found, "driver": driver, "volume_id": volume_id}

    def settle(self) -> None:
        """Read the request, and keep it no longer."""
        request, self._request = self._request, None
        # Never changed in place: a thread of the same call may be writing its log line.
        found = dict(self._found)
        if driver := self._driver():
            found.setdefault("driver", driver)
        if isinstance(request, bytes):
            request = decoded(self._method, request)
        if isinstance(request, Message):
            _read(request, found)
        self._found = {**found, **self._found}

    def _settled(self) -> dict[str, str]:
        if self._request is not None:
            self.settle()
        return self._found

    def __getitem__(self, key: str) -> str:
        return self.request_id if key == "request_id" else self._settled()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._settled())

    def __len__(self) -> int:
        return len(self._settled())

    def items(self) -> ItemsView[str, str]:
        """All of them; at once, because every log line asks."""
        return self._settled().items()


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
    kind = _kind(method)
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


def _kind(method: str) -> Any:
    return _kinds().get(method)


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
