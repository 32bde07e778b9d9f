"""The values of the keys: JSON, so that an operator can read them with etcdctl, with a version.

Each reader checks what it reads: a node that was taken over can write anything below its own directory, and the
controller must neither fail by it nor treat it as another node's. Keys that are unknown are left out, so that nodes
and controllers of two versions understand each other during an upgrade.
"""

from typing import Annotated, Literal, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from crust import errors
from crust.cluster.protocol import Announcement, Answer, Request

Size = Annotated[int, Field(ge=0, lt=1 << 63)]
Text = Annotated[str, Field(max_length=4096)]
Id = Annotated[str, Field(max_length=256)]


class StoreValueInvalid(errors.Corrupt):
    """The value of a key in the store is not what crust writes there."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(
            f"the store's key {key} is not read",
            why=why,
            hint="see which program writes there, with what certificate",
        )


class _Record(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="ignore", ser_json_bytes="base64", val_json_bytes="base64"
    )

    version: Literal[1] = 1

    def encoded(self) -> bytes:
        """As it is written."""
        return self.model_dump_json().encode()


R = TypeVar("R", bound=_Record)


class AnnouncementRecord(_Record):
    """`protocol.Announcement`."""

    node_id: Id
    pool_id: Id
    segments: Annotated[dict[Id, Id], Field(max_length=64)]
    capacity_bytes: Size
    maximum_bytes: Size
    volumes: Size
    max_volumes: Size
    is_ready: bool
    boot: Id
    extra: Annotated[dict[Id, Text], Field(max_length=64)]
    restored: Size = 0

    @classmethod
    def of(cls, said: Announcement) -> "AnnouncementRecord":
        """To write."""
        return cls(
            node_id=said.node_id,
            pool_id=said.pool_id,
            segments=dict(said.segments),
            capacity_bytes=said.capacity_bytes,
            maximum_bytes=said.maximum_bytes,
            volumes=said.volumes,
            max_volumes=said.max_volumes,
            is_ready=said.is_ready,
            boot=said.boot,
            extra=dict(said.extra),
            restored=said.restored,
        )

    def announcement(self) -> Announcement:
        """What was written."""
        return Announcement(**self.model_dump(exclude={"version"}))


class RequestRecord(_Record):
    """`protocol.Request`; its id is in the key."""

    method: Id
    message: bytes
    deadline_unix_s: float = 0
    pool_id: Id = ""

    @classmethod
    def of(cls, asked: Request) -> "RequestRecord":
        """To write."""
        return cls(
            method=asked.method,
            message=asked.message,
            deadline_unix_s=asked.deadline_unix_s,
            pool_id=asked.pool_id,
        )

    def request(self, request_id: str, delivery: int, *, has_returned: bool = False) -> Request:
        """What was asked, as it is delivered."""
        return Request(
            request_id,
            self.method,
            self.message,
            self.deadline_unix_s,
            self.pool_id,
            delivery,
            has_returned,
        )


class AnswerRecord(_Record):
    """`protocol.Answer`."""

    code: Annotated[int, Field(ge=0, le=16)]
    message: Text = ""
    response: bytes = b""

    def answer(self) -> Answer:
        """What was answered."""
        return Answer(self.code, self.message, self.response)


class LeaderRecord(_Record):
    """Who leads, for people; `term` tells one attempt from another."""

    name: Id
    term: Id


def decode(kind: type[R], key: bytes, value: bytes) -> R:
    """The record of a value. Raises `StoreValueInvalid`."""
    try:
        return kind.model_validate_json(value)
    except pydantic.ValidationError as err:
        lines = err.errors(include_url=False, include_input=False)
        why = "; ".join(f"{'.'.join(map(str, each['loc']))} {each['msg']}" for each in lines[:4])
        raise StoreValueInvalid(key.decode("ascii", "backslashreplace"), why) from None
