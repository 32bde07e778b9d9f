"""The schema number of stored JSON: read before anything else of it, and equal to the known number, or refused.

A change of a layout raises its number. Code that reads another layout by its own rules finds no volume in a full
pool, and would answer that each volume is absent. So it reads neither a later nor an earlier number. Within a number
fields are only added.
"""

from typing import Annotated

import pydantic

NO_NUMBER = "it is not JSON with a schema number"


class _Head(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="ignore", strict=True)

    number: Annotated[int, pydantic.Field(alias="schema")]


def number_of(data: bytes) -> int | None:
    """The number in a JSON object; None for other bytes."""
    try:
        return _Head.model_validate_json(data).number
    except pydantic.ValidationError:
        return None


def mismatch(data: bytes, known: int) -> str:
    """The reason why stored bytes are not read by code that knows the schema `known` alone; empty if they are."""
    number = number_of(data)
    if number is None:
        return NO_NUMBER
    return "" if number == known else other(number, known)


def other(number: int, known: int) -> str:
    """The reason why bytes of another schema are not read."""
    return f"it has schema {number}, and this version of crust reads schema {known} alone"


def first_problem(err: pydantic.ValidationError) -> str:
    """The first field that is wrong, and why, without its value."""
    first = err.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
