"""The end of a node's directories: a sealed target can be removed by nobody else.

A test that takes a guard mount away, or kills the proxy, leaves the directory below it immutable, as a reboot does
(crust/host/files/sealed.py).
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from crust.core import errors
from crust.host.files import sealed


def remove(path: Path | str) -> None:
    """Remove the directory and all below it. Raises `OSError` for what stays."""
    shutil.rmtree(path, onerror=_unseal)
    if os.path.lexists(path):
        shutil.rmtree(path)


@contextmanager
def temporary(prefix: str) -> Iterator[str]:
    """A new directory, removed after the block."""
    path = tempfile.mkdtemp(prefix=prefix)
    try:
        yield path
    finally:
        remove(path)


@contextmanager
def of_mounts(prefix: str) -> Iterator[Path]:
    """A new directory, removed after the block but for mount points: these go with the mount namespace of the run."""
    path = tempfile.mkdtemp(prefix=prefix)
    try:
        yield Path(path)
    finally:
        with suppress(OSError):
            remove(path)


def _unseal(_: object, path: str, error: tuple[type[BaseException], BaseException, object]) -> None:
    with suppress(errors.CrustError, OSError):
        if isinstance(error[1], PermissionError) and sealed.unseal(path, path):
            os.rmdir(path)
