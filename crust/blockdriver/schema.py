"""The schema number of stored JSON: read before anything else of it, and a known number, or refused.

A change of a layout raises its number. Code that reads another layout by its own rules finds no volume in a full
pool, and would answer that each volume is absent. So it reads the number that it writes, and an earlier one only
where each record means the same. Within a number fields are only added.
"""

from typing import Annotated

import pydantic

NO_NUMBER = "it is not JSON with a schema number"


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


def first_problem(err: pydantic.ValidationError) -> str:
    """The first field that is wrong, and why, without its value."""
    first = err.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
