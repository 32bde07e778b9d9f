"""The descriptor pool of crust's generated code.

A process has one default pool, and a pool refuses a second definition of a name. Every driver in Python has a `csi.v1`
of its own there, and the library of `crust.csi_shim` runs in its process. So crust's messages, with the same names and
more fields, are in a pool of their own. Two rules follow. A message of another pool is not one of ours: it goes from
one to the other as bytes. And a field option that csi.proto defines must be read by this pool's class of options,
because protobuf decodes options with the default pool: `options_of`.
"""

from typing import Any, TypeVar, cast

from google.protobuf import (
    descriptor,
    descriptor_pb2,
    descriptor_pool,
    message_factory,
    timestamp_pb2,
    wrappers_pb2,
)
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

POOL = descriptor_pool.DescriptorPool()
"""Has the files that our protos import."""

for _imported in (descriptor_pb2, timestamp_pb2, wrappers_pb2):
    POOL.AddSerializedFile(_imported.DESCRIPTOR.serialized_pb)


def class_of(kind: type[M]) -> type[M]:
    """This pool's class for one of protobuf's own messages: fields of ours take no other."""
    name = kind.DESCRIPTOR.full_name
    return cast("type[M]", message_factory.GetMessageClass(POOL.FindMessageTypeByName(name)))


def options_of(described: descriptor.DescriptorBase) -> Any:
    """The options of a field, message or value of this pool, with the extensions that csi.proto defines."""
    options: Any = described.GetOptions()
    return class_of(type(options)).FromString(options.SerializeToString())
