"""The removal of an entry: one rename, after which no reader finds any of it, and the deletion of what was renamed.

Only known files are deleted, and never recursively: unknown names stay for a person to look at.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from crust.handoff import claims, layout
from crust.handoff.entry import Entry, names
from crust.handoff.layout import Layout
from crust.host.files import durable
from crust.host.process import oserrors

_log = logging.getLogger(__name__)


class Unpublish:
    """The removal of an entry, with its claim lock held: no sandbox has the volume, and none can claim it meanwhile.

    A block that ends without `complete` leaves the entry as it is; a retry unpublishes it.
    """

    def __init__(
        self, lock: claims.ClaimLock, entry: Entry, root: Layout, writing: threading.RLock
    ) -> None:
        self._lock = lock
        self._layout = root
        self._writing = writing
        self.entry = entry

    def complete(self, clear: Callable[[], None] | None = None) -> None:
        """Remove the entry, and clear its target meanwhile. If that fails, the entry is there again.

        If the process dies after the rename, `remove_orphans` does the rest.
        """
        directory = self._lock.paths.directory
        gone = self._layout.new_gone(self._lock.paths.digest, is_target_clear=clear is None)
        with self._writing, oserrors.translating(f"cannot unpublish {directory}"):
            os.rename(directory, gone)
        try:
            durable.sync_directory(self._layout.root)
            if clear is not None:
                clear()
        except BaseException:
            with self._writing:
                put_back(gone, directory)
            raise
        delete_files(gone)

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def put_back(gone: str, directory: str) -> None:
    """Undo the rename of an unpublish: what exists must be visible."""
    with oserrors.translating(f"cannot restore {directory}"):
        os.rename(gone, directory)
    durable.sync_directory(os.path.dirname(directory))


def delete_files(directory: str) -> bool:
    """Delete a directory with a temporary name, file by file; False if it had to be kept.

    Only known names are deleted, and never recursively: unknown names stay for a person to look at.
    """
    for name in names(directory):
        if layout.kind_in_entry(name) is layout.NameKind.UNKNOWN:
            continue
        # FileNotFoundError: already deleted. IsADirectoryError: crust creates none there, so it is kept.
        harmless = contextlib.suppress(FileNotFoundError, IsADirectoryError)
        with oserrors.translating(f"cannot remove {directory}/{name}"), harmless:
            os.unlink(f"{directory}/{name}")
    kept = names(directory)
    if kept:
        _log.warning(
            "kept a directory with unknown files", extra={"directory": directory, "names": kept}
        )
        return False
    with oserrors.translating(f"cannot remove {directory}"), contextlib.suppress(FileNotFoundError):
        os.rmdir(directory)
    return True
