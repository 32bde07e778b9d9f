"""The form of a record on disk: one JSON object in a file of its own, with a schema number.

A record of a later schema is refused. Within a schema fields are only added: fields that this version does not know
are kept and written back, so that a return to an earlier version loses nothing.
"""

import secrets
from typing import Annotated, ClassVar, Protocol, Self

import pydantic

from crust import errors

SCHEMA = 1
PART = pydantic.ConfigDict(frozen=True, extra="allow", strict=True)
"""The configuration of a record's parts."""

UNREADABLE = (errors.Corrupt, errors.Refused, errors.RuntimeFailed)
"""Errors of one volume's record or image only: damaged, owned by another user, a bad sector."""


def new_attempt() -> str:
    """The `attempt` of records that are about to be written."""
    return secrets.token_hex(8)


class _Unreadable(Protocol):
    def __call__(self, path: str, why: str, /) -> errors.CrustError: ...


class _Newer(Protocol):
    def __call__(self, path: str, found: int, /) -> errors.CrustError: ...


class StoredRecord(pydantic.BaseModel):
    """The common part of all records. Each kind names its errors."""

    model_config = PART

    UNREADABLE: ClassVar[_Unreadable]
    NEWER: ClassVar[_Newer]

    version: Annotated[int, pydantic.Field(alias="schema")] = SCHEMA

    @classmethod
    def parse(cls, data: bytes, path: str) -> Self:
        """Decode a record; raises the kind's errors."""
        try:
            made = cls.model_validate_json(data)
        except pydantic.ValidationError as err:
            cls._check_schema(schema_of(data), path)
            first = err.errors(include_input=False, include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise cls.UNREADABLE(path, f"{where}: {first['msg']}") from err
        cls._check_schema(made.version if "version" in made.model_fields_set else None, path)
        return made

    @classmethod
    def _check_schema(cls, found: int | None, path: str) -> None:
        if found is None:
            raise cls.UNREADABLE(path, "it is not JSON with a schema number")
        if found > SCHEMA:
            raise cls.NEWER(path, found)

    def encode(self) -> bytes:
        """The record as one line of JSON."""
        return self.model_dump_json(by_alias=True).encode() + b"\n"

    def but(self, **changes: object) -> Self:
        """A checked copy with `changes`, which name fields of this version."""
        assert changes.keys() <= type(self).model_fields.keys()
        made = type(self).model_validate({**self.model_dump(by_alias=True), **changes})
        if (
            isinstance(made, Remembered)
            and isinstance(self, Remembered)
            and self.stored is not None
        ):
            made.note_stored(self.stored)
        return made


class Remembered(pydantic.BaseModel):
    """A record that knows what is stored under its id: a write in place of something else is refused.

    `stored` is what was read or written last; None if nothing was. A copy keeps it; it is no part of the record.
    """

    model_config = PART

    _stored: bytes | None = pydantic.PrivateAttr(default=None)

    @property
    def stored(self) -> bytes | None:
        """The stored record that this one is made of."""
        return self._stored

    def note_stored(self, data: bytes | None) -> Self:
        """Remember what is stored now; returns the record."""
        self._stored = data
        return self


class _Head(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="ignore", strict=True)

    version: Annotated[int, pydantic.Field(alias="schema")]


def schema_of(data: bytes) -> int | None:
    """The schema number of a record of any kind and version; None if it has none."""
    try:
        return _Head.model_validate_json(data).version
    except pydantic.ValidationError:
        return None
