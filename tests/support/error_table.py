"""docs/errors.md, made from the code: every error class, its gRPC code, and what a caller should do.

`python -m tests.support.error_table` writes it anew; a test holds the committed file against this.
"""

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator

import crust
from crust import errors
from crust.rpc import status

HEAD = """# Errors

Every error says what failed, why, and what to do. Its *branch* says what the caller should do, and gives the gRPC
status code; its *leaf* says what happened. Codes are in `crust/rpc/status.py` alone. A wrapped driver's own status
passes unchanged.
A failure that is none of these is a bug: `INTERNAL` with a request id, under which the log has the reason.

This page is made from the code: `python -m tests.support.error_table > docs/errors.md`.
"""


def all_classes() -> tuple[type[errors.CrustError], ...]:
    """Every error class of every module of crust, by name."""
    for module in pkgutil.walk_packages(crust.__path__, "crust."):
        if ".wire." not in module.name and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found = {each for each in _below(errors.CrustError) if each.__module__.startswith("crust.")}
    return tuple(sorted(found, key=lambda each: (each.__module__, each.__qualname__)))


def branch_of(leaf: type[errors.CrustError]) -> type[errors.CrustError]:
    """The branch of `crust.errors` that a leaf hangs on."""
    return next(each for each in leaf.__mro__ if each.__module__ == "crust.errors")


def render() -> str:
    """The page."""
    classes = all_classes()
    lines = [HEAD]
    for branch in status.CODES:
        lines += [f"## {branch.__name__}: `{status.CODES[branch].name}`", "", _advice(branch), ""]
        leaves = [each for each in classes if branch_of(each) is branch and each is not branch]
        if leaves:
            lines += ["| error | code | what happened |", "|---|---|---|", *map(_row, leaves), ""]
    return "\n".join(lines).rstrip() + "\n"


def _row(leaf: type[errors.CrustError]) -> str:
    code = status.code_of_class(leaf).name
    room = leaf.__module__.removeprefix("crust.")
    return f"| `{leaf.__name__}` ({room}) | `{code}` | {_first_line(leaf)} |"


def _advice(branch: type[errors.CrustError]) -> str:
    """The words that the tree in `crust.errors` has for a branch."""
    (line,) = [
        each for each in (errors.__doc__ or "").splitlines() if f"─ {branch.__name__} " in each
    ]
    advice = line.split(branch.__name__, 1)[1].strip()
    return f"{_first_line(branch)} What to do: {advice}."


def _first_line(leaf: type[errors.CrustError]) -> str:
    return (inspect.getdoc(leaf) or "").splitlines()[0].replace("|", "\\|")


def _below(cls: type[errors.CrustError]) -> Iterator[type[errors.CrustError]]:
    for each in cls.__subclasses__():
        yield each
        yield from _below(each)


if __name__ == "__main__":
    sys.stdout.write(render())
