"""The messages of a driver in this process, which may have its own generated code for csi.v1.

Its classes are in another descriptor pool (`crust.wire.pool`), and its code may be of an older CSI without crust's
fields. Messages go between the two as bytes: protobuf keeps fields that a class does not know, so a driver's answer
carries `deferred_mount` through its own class. Which classes the driver has is learned from the requests that its own
server decodes.
"""

from typing import Any, TypeVar, cast

from google.protobuf import message_factory
from google.protobuf.message import Message

from crust.wire.csi.v1 import csi_pb2

M = TypeVar("M", bound=Message)


def ours(kind: type[M], message: Message) -> M:
    """A message of the driver in crust's class."""
    return message if isinstance(message, kind) else kind.FromString(message.SerializeToString())


def like(message: M, given: Message) -> M:
    """A message of crust in the class that the driver of `given` has for it."""
    return _in_file(message, given.DESCRIPTOR.file)


class DriversMessages:
    """The driver's classes; crust's own until a request of the driver was seen."""

    def __init__(self) -> None:
        self._file: Any = csi_pb2.DESCRIPTOR

    def learn(self, request: Message) -> None:
        """The driver's server has decoded `request`."""
        self._file = request.DESCRIPTOR.file

    def theirs(self, message: M) -> M:
        """A message of crust in the driver's class."""
        return _in_file(message, self._file)


def _in_file(message: M, file: Any) -> M:
    found = file.message_types_by_name[message.DESCRIPTOR.name]
    if found is message.DESCRIPTOR:
        return message
    kind = cast("type[M]", message_factory.GetMessageClass(found))
    return kind.FromString(message.SerializeToString())
