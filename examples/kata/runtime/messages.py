"""What a client and the daemon say to one another: one JSON object per line.

A request is one line; the answers are lines until `exit`, `done` or `error`. Output travels as base64, because it is
bytes.
"""

import base64
import json
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from crust import errors

LIMIT_BYTES = 1 << 20


class InvalidMessage(errors.InvalidRequest):
    """A line that is no message."""

    def __init__(self, why: str) -> None:
        super().__init__(
            "the request is not understood", why=why, hint="use the client of this version"
        )


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


_SandboxId = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
"""A directory's name, and short, for the sockets below it."""

_Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]
"""What the kernel can be told: no NUL."""


class Mount(_Message):
    """A container's mount, as in an OCI bundle."""

    source: Annotated[_Text, Field(min_length=1, max_length=4095)]
    destination: Annotated[str, Field(pattern=r"^/[^\x00]*$", max_length=4095)]
    readonly: bool = False


class Run(_Message):
    """Run a command in a sandbox, which is made if it is not there. With `keep` it stays when the command ends."""

    op: Literal["run"] = "run"
    sandbox: _SandboxId
    argv: Annotated[tuple[_Text, ...], Field(min_length=1)]
    mounts: tuple[Mount, ...] = ()
    env: dict[_Text, _Text] = {}
    keep: bool = False


class Stop(_Message):
    """Stop a sandbox: unmount, unplug, power off. Not there is fine."""

    op: Literal["stop"] = "stop"
    sandbox: _SandboxId


class List(_Message):
    """Tell the sandboxes and their volumes."""

    op: Literal["list"] = "list"


Request = Annotated[Run | Stop | List, Field(discriminator="op")]
_REQUEST: pydantic.TypeAdapter[Run | Stop | List] = pydantic.TypeAdapter(Request)


def parse(line: bytes) -> Run | Stop | List:
    """A request; raises `InvalidMessage`."""
    try:
        return _REQUEST.validate_json(line)
    except pydantic.ValidationError as err:
        found = err.errors(include_url=False, include_context=False, include_input=False)
        reasons = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in found)
        raise InvalidMessage(reasons) from err


def encode(answer: dict[str, Any]) -> bytes:
    """A line."""
    return json.dumps(answer, separators=(",", ":")).encode() + b"\n"


def output(stream: str, data: bytes) -> dict[str, Any]:
    """What a container wrote."""
    return {"event": "output", "stream": stream, "data": base64.b64encode(data).decode()}


def failure(error: errors.CrustError) -> dict[str, Any]:
    """An error, whole."""
    return {
        "event": "error",
        "kind": type(error).__name__,
        "what": error.what,
        "why": error.why,
        "hint": error.hint,
    }
