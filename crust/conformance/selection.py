"""Which cases run: `C-101`, `c-101`, `101`, or a range `C-100..C-199`; also several with commas between them.

The cases for runtimes begin with R, those for drivers with C.
"""

import re
from collections.abc import Collection, Iterable

from crust.core import errors

_PATTERN = re.compile(r"(?:[cr]-?)?(\d{1,3})(?:\.\.(?:[cr]-?)?(\d{1,3}))?", re.IGNORECASE)


def chosen(known: Collection[str], only: Iterable[str], skip: Iterable[str]) -> frozenset[str]:
    """The cases of `known` that `only` names (all without it), less those of `skip`.

    Raises `errors.InvalidRequest` for what names no case: a misspelt number would run nothing, and pass.
    """
    named = [_matching(known, each) for each in _parts(only)]
    left_out = [_matching(known, each) for each in _parts(skip)]
    return frozenset(known if not named else set().union(*named)).difference(*left_out)


def _parts(patterns: Iterable[str]) -> list[str]:
    return [part.strip() for each in patterns for part in each.split(",")]


def _matching(known: Collection[str], pattern: str) -> set[str]:
    found = _PATTERN.fullmatch(pattern)
    if found is None:
        raise _no_such_case(pattern, "it is no number of a case, and no range of two")
    kind = next(iter(known), "C")[0]
    if any(letter in "CR" and letter != kind for letter in pattern.upper()):
        raise _no_such_case(pattern, f"the cases of this suite begin with {kind}")
    first, last = int(found[1]), int(found[2] or found[1])
    matching = {each for each in known if first <= int(each[2:]) <= last}
    if not matching:
        raise _no_such_case(pattern, "no case has such a number")
    return matching


def _no_such_case(pattern: str, why: str) -> errors.InvalidRequest:
    return errors.InvalidRequest(
        f"no such case: {pattern}",
        why=why,
        hint="crust conformance --list shows all; write C-101, or C-100..C-199",
    )
