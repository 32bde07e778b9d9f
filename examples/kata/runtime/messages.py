"""The messages between a client and the daemon: one JSON object per line.

A request is one line; the answers are lines up to `exit`, `done` or `error`. Output is base64, because it is bytes.
"""

import base64
import json
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from crust.core import errors

LIMIT_BYTES = 1 << 20


class InvalidMessage(errors.InvalidRequest):
    """A line is not a valid request."""

    def __init__(self, why: str) -> None:
        super().__init__("the request is invalid", why=why, hint="use the client of this version")


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


_SandboxId = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
"""It names a directory, and is short because socket paths below it are limited to 107 bytes."""

_Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]
"""A string for the kernel: without NUL."""


class Mount(_Message):
    """A container's mount, as in an OCI bundle."""

    source: Annotated[_Text, Field(min_length=1, max_length=4095)]
    destination: Annotated[str, Field(pattern=r"^/[^\x00]*$", max_length=4095)]
    readonly: bool = False


class Run(_Message):
    """Run a command in a sandbox, which is created if it does not exist. `keep`: it stays when the command ends."""

    op: Literal["run"] = "run"
    sandbox: _SandboxId
    argv: Annotated[tuple[_Text, ...], Field(min_length=1)]
    mounts: tuple[Mount, ...] = ()
    env: dict[_Text, _Text] = {}
    keep: bool = False


class Stop(_Message):
    """Stop a sandbox: unmount, unplug, power off. An absent sandbox is success."""

    op: Literal["stop"] = "stop"
    sandbox: _SandboxId


class List(_Message):
    """List the sandboxes and their volumes."""

    op: Literal["list"] = "list"


class Logs(_Message):
    """The output of a guest's console; with `follow` also later output, until the client leaves."""

    op: Literal["logs"] = "logs"
    sandbox: _SandboxId
    follow: bool = False


AnyRequest = Run | Stop | List | Logs
Request = Annotated[AnyRequest, Field(discriminator="op")]
_REQUEST: pydantic.TypeAdapter[AnyRequest] = pydantic.TypeAdapter(Request)


def parse(line: bytes) -> AnyRequest:
    """A request; raises `InvalidMessage`."""
    try:
        return _REQUEST.validate_json(line)
    except pydantic.ValidationError as err:
        problems = err.errors(include_url=False, include_context=False, include_input=False)
        reasons = "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in problems
        )
        raise InvalidMessage(reasons) from err


def encode(answer: dict[str, Any]) -> bytes:
    """A line."""
    return json.dumps(answer, separators=(",", ":")).encode() + b"\n"


def output(stream: str, data: bytes) -> dict[str, Any]:
    """The answer that carries a piece of a container's output."""
    return {"event": "output", "stream": stream, "data": base64.b64encode(data).decode()}


def failure(error: errors.CrustError) -> dict[str, Any]:
    """The answer that carries an error."""
    return {
        "event": "error",
        "kind": error.error_name,
        "what": error.what,
        "why": error.why,
        "hint": error.hint,
    }
