"""The schema number of stored JSON: read before anything else of it, and a known number, or refused.

A change of a layout raises its number. Code that reads another layout by its own rules finds no volume in a full
pool, and would answer that each volume is absent. So it reads the number that it writes, and an earlier one only
where each record means the same. Within a number fields are only added.
"""

from collections.abc import Callable
from typing import Annotated, TypeVar

import pydantic

T = TypeVar("T")


class Unreadable(ValueError):
    """Its text says why stored bytes are not read."""


class OtherSchema(Unreadable):
    """They are of another schema."""


class _Head(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="ignore", strict=True)

    number: Annotated[int, pydantic.Field(alias="schema")]


def read(validate: Callable[[bytes], T], data: bytes, *known: int) -> T:
    """What pydantic's `validate` makes of stored bytes of a schema that is `known`. Raises `OtherSchema`, and
    `Unreadable` without a number, or for the first field that is wrong, without its value.
    """
    try:
        number = _Head.model_validate_json(data).number
    except pydantic.ValidationError as err:
        raise Unreadable("it is not JSON with a schema number") from err
    if number not in known:
        readable = " and ".join(map(str, known))
        why = f"it has schema {number}, and this version of crust reads schema {readable} alone"
        raise OtherSchema(why)
    try:
        return validate(data)
    except pydantic.ValidationError as err:
        first = err.errors(include_input=False, include_url=False)[0]
        raise Unreadable(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from err
