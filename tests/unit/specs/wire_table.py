"""Two ways to the same flat facts about csi.v1: the table of the specification, and our compiled descriptor.

A fact is one line, e.g. `VolumeCapability.MountVolume 2: repeated string mount_flags` or `Node rpc NodeGetInfo(...)`.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor

from crust.wire import pool
from crust.wire.csi.v1 import csi_pb2

TABLE = Path(__file__).with_name("csi-1.13-wire.txt")
_KINDS = ("service ", "message ", "enum ", "extend ")
_MARKS = re.compile(r" \[([\w, ]+)\]")
_SCALARS = {
    name.removeprefix("TYPE_").lower(): number
    for name, number in vars(descriptor.FieldDescriptor).items()
    if name.startswith("TYPE_")
}
_NAMES = {number: name for name, number in _SCALARS.items()}


def of_table() -> set[str]:
    """The facts of the table; lines that reserve numbers are not facts about what there is."""
    facts: set[str] = set()
    scopes: list[tuple[int, str]] = []
    for raw in TABLE.read_text(encoding="utf-8").splitlines():
        line = raw.strip()
        if not line or line.startswith(("#", "reserved ")):
            continue
        indent = len(raw) - len(raw.lstrip())
        scopes = [scope for scope in scopes if scope[0] < indent]
        outer = ".".join(name for _, name in scopes)
        if line.startswith(_KINDS):
            kind, name = _MARKS.sub("", line).split()
            scopes.append((indent, name))
            whole = f"{outer}.{name}" if outer else name
            facts.add(_marked(f"{kind} {whole}", _marks(line)))
        else:
            facts.add(_marked(f"{outer} {_MARKS.sub('', line)}", _marks(line)))
    return facts


def of_descriptor() -> set[str]:
    """The facts of the compiled proto file."""
    file = csi_pb2.DESCRIPTOR
    facts: set[str] = set()
    for service in file.services_by_name.values():
        facts |= set(_of_service(service))
    for message in file.message_types_by_name.values():
        facts |= set(_of_message(message))
    for enum in file.enum_types_by_name.values():
        facts |= set(_of_enum(enum))
    return facts


def _of_service(service: Any) -> Iterator[str]:
    yield _marked(f"service {service.name}", _alpha(service, csi_pb2.alpha_service))
    for rpc in service.methods:
        asks = f"{'stream ' if rpc.client_streaming else ''}{rpc.input_type.name}"
        answers = f"{'stream ' if rpc.server_streaming else ''}{rpc.output_type.name}"
        line = f"{service.name} rpc {rpc.name}({asks}) -> {answers}"
        yield _marked(line, _alpha(rpc, csi_pb2.alpha_method))


def _of_message(message: Any) -> Iterator[str]:
    name = _local(message)
    yield _marked(f"message {name}", _alpha(message, csi_pb2.alpha_message))
    for field in message.fields:
        yield _of_field(name, field)
    for nested in message.nested_types:
        if not nested.GetOptions().map_entry:
            yield from _of_message(nested)
    for enum in message.enum_types:
        yield from _of_enum(enum)


def _of_field(name: str, field: Any) -> str:
    line = f"{name} {field.number}: {_type(field)} {field.name}"
    if field.containing_oneof is not None:
        line += f" (oneof {field.containing_oneof.name})"
    marks = _alpha(field, csi_pb2.alpha_field)
    if pool.options_of(field).Extensions[csi_pb2.csi_secret]:
        marks.append("csi_secret")
    return _marked(line, marks)


def _of_enum(enum: Any) -> Iterator[str]:
    name = _local(enum)
    yield _marked(f"enum {name}", _alpha(enum, csi_pb2.alpha_enum))
    for value in enum.values:
        yield _marked(
            f"{name} {value.name} = {value.number}", _alpha(value, csi_pb2.alpha_enum_value)
        )


def _type(field: Any) -> str:
    other = field.message_type or field.enum_type
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        return f"map<{_type(key)},{_type(value)}>"
    plain = _local(other) if other is not None else _NAMES[field.type]
    return f"repeated {plain}" if field.is_repeated else plain


def _local(thing: Any) -> str:
    name: str = thing.full_name
    return name.removeprefix("csi.v1.")


def _alpha(thing: Any, option: Any) -> list[str]:
    return ["alpha"] if pool.options_of(thing).Extensions[option] else []


def _marks(line: str) -> list[str]:
    return [mark for group in _MARKS.findall(line) for mark in group.split(", ")]


def _marked(line: str, marks: list[str]) -> str:
    return " ".join([line, *(f"[{mark}]" for mark in sorted(marks))])
