"""System calls that a test watches; what a call writes and syncs, in order: an answer must be durable."""

import importlib
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

Seen = Callable[[str, tuple[Any, ...]], None]
"""Gets the name of a call and its arguments."""
Done = Callable[[str, tuple[Any, ...], Any], None]
"""Gets the name of a call, its arguments and its result."""
Steps = list[tuple[str, str]]


def _unseen(_name: str, _arguments: tuple[Any, ...], _result: Any = None) -> None:
    """Nobody watches."""


@contextmanager
def watched(
    calls: Collection[str], *, before: Seen = _unseen, after: Done = _unseen
) -> Iterator[None]:
    """Call `before` before each of these calls, and `after` when it has succeeded, while the block runs.

    A name is of a function of `os`, or with its module ("builtins.open"): a module must call it by that name.
    """

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            before(name, args)
            result = real(*args, **kwargs)
            after(name, args, result)
            return result

        return called

    saved = {name: getattr(*_function(name)) for name in calls}
    for name, real in saved.items():
        setattr(*_function(name), wrap(name, real))
    try:
        yield
    finally:
        for name, real in saved.items():
            setattr(*_function(name), real)


def _function(name: str) -> tuple[ModuleType, str]:
    module, _, attribute = name.rpartition(".")
    return importlib.import_module(module or "os"), attribute


@contextmanager
def recorded() -> Iterator[Steps]:
    """("sync", path) of each fsync and fdatasync, ("name", path) of each rename, link and unlink, as they return."""
    steps: Steps = []

    def after(name: str, arguments: tuple[Any, ...], _result: Any) -> None:
        if name in ("rename", "link", "unlink"):
            path = os.fspath(arguments[0 if name == "unlink" else 1])
            steps.append(("name", os.path.realpath(path)))
        else:
            file = arguments[0]
            fd = file if isinstance(file, int) else file.fileno()
            steps.append(("sync", os.readlink(f"/proc/self/fd/{fd}")))

    with watched(("fsync", "fdatasync", "rename", "link", "unlink"), after=after):
        yield steps
