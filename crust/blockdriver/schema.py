"""The schema number of stored JSON: read before anything else of it, and a known number, or refused.

A change of a layout raises its number. Code that reads another layout by its own rules finds no volume in a full
pool, and would answer that each volume is absent. So it reads the number that it writes, and an earlier one only
where each record means the same. Within a number fields are only added.
"""

from collections.abc import Callable
from typing import Annotated, TypeVar

import pydantic

T = TypeVar("T")
NO_NUMBER = "it is not JSON with a schema number"


class Unreadable(ValueError):
    """Its text says why stored bytes are not read."""


class _Head(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="ignore", strict=True)

    number: Annotated[int, pydantic.Field(alias="schema")]


def mismatch(data: bytes, *known: int) -> str:
    """Why code that knows the schemas `known` alone does not read stored bytes, or `NO_NUMBER`; else empty."""
    try:
        number = _Head.model_validate_json(data).number
    except pydantic.ValidationError:
        return NO_NUMBER
    if number in known:
        return ""
    read = " and ".join(map(str, known))
    return f"it has schema {number}, and this version of crust reads schema {read} alone"


def read(validate: Callable[[bytes], T], data: bytes, *known: int) -> T:
    """What pydantic's `validate` makes of stored bytes of a schema that is `known`. Raises `Unreadable`: for
    `mismatch`, or for the first field that is wrong, without its value.
    """
    if other := mismatch(data, *known):
        raise Unreadable(other)
    try:
        return validate(data)
    except pydantic.ValidationError as err:
        first = err.errors(include_input=False, include_url=False)[0]
        raise Unreadable(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from err
