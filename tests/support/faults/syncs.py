"""What a call writes and syncs, in order: for the rule that an answer is durable."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

Steps = list[tuple[str, str]]


@contextmanager
def recorded() -> Iterator[Steps]:
    """("sync", path) of each fsync and fdatasync, ("name", path) of each rename, link and unlink, as they return."""
    steps: Steps = []

    def path_of(file: Any) -> str:
        return os.readlink(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}")

    def sync(real: Any) -> Any:
        def called(file: Any) -> None:
            path = path_of(file)
            real(file)
            steps.append(("sync", path))

        return called

    def name(real: Any, which: int) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            steps.append(("name", os.path.realpath(os.fspath(args[which]))))
            return result

        return called

    with pytest.MonkeyPatch.context() as patched:
        for each in ("fsync", "fdatasync"):
            patched.setattr(os, each, sync(getattr(os, each)))
        for each, which in (("rename", 1), ("link", 1), ("unlink", 0)):
            patched.setattr(os, each, name(getattr(os, each), which))
        yield steps
