"""What the bytes of a request, and the name of its method, say."""

from typing import TypeVar

from google.protobuf import message

from crust.core import errors

Request = TypeVar("Request", bound=message.Message)
DecodeError = message.DecodeError


def parse(kind: type[Request], data: bytes) -> Request:
    """Parse a message; unknown fields are kept. Raises `MalformedMessage`."""
    try:
        return kind.FromString(data)
    except DecodeError as err:
        raise errors.InvalidRequest.named(
            "MalformedMessage",
            f"the request cannot be parsed as {kind.DESCRIPTOR.full_name}",
            why="its bytes are not a valid protobuf message",
            hint="check the caller's CSI version, and any proxy between it and crust",
        ) from err


def needs_state(method: str) -> bool:
    """Whether a method of CSI reads or writes the state: all but identity, health and capabilities do."""
    return not (method.startswith("/csi.v1.Identity/") or method.endswith("Capabilities"))


def identity(request: message.Message) -> bytes:
    """The identity of a request: its fields without the secrets, which may be renewed."""
    plain = request
    if getattr(request, "secrets", None):
        plain = type(request)()
        plain.CopyFrom(request)
        plain.ClearField("secrets")
    return plain.SerializeToString(deterministic=True)
