"""What a case has done, to be undone: every step is noted before it is requested, newest last.

The steps are undone in the opposite order, so that a volume is unpublished first, then unstaged, then deleted. What
cannot be removed is a finding, and never stops the rest.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import grpc

from crust.conformance.case import Clause, Strength
from crust.conformance.orchestrator.calls import Calls, Code, Refusal
from crust.conformance.orchestrator.host_view import HostView
from crust.conformance.results import Finding, explained

_UNDO = Clause(
    Strength.MUST,
    "NodeUnpublishVolume, NodeUnstageVolume, DeleteVolume",
    "this RPC MUST undo the work by the corresponding one; this operation MUST be idempotent",
)
_FORGOTTEN = Clause(
    Strength.SHOULD,
    "NodeUnpublishVolume Errors",
    "NOT_FOUND is allowed for a volume that does not exist; what it left on the host should be gone",
)
_DIRECTORY = Clause(
    Strength.BEYOND, "after the case", "nothing of the driver's is in the CO's directories"
)


class Undo:
    """The steps of one case, and the directory `root` that all its paths are below."""

    def __init__(self, calls: Calls, host: HostView, root: Path) -> None:
        self._calls = calls
        self._host = host
        self._root = root
        self._steps: list[Callable[[], None]] = []

    def later(self, step: Callable[[], None]) -> None:
        """Do `step` in the end."""
        self._steps.append(step)

    def clean(self) -> list[Finding]:
        """Remove everything, newest first; returns what could not be removed.

        NOT_FOUND means that nothing is left of it: CSI allows it for a volume that does not exist.
        """
        left: list[Finding] = []
        clause = _UNDO
        while self._steps:
            try:
                self._steps.pop()()
            except Refusal as refusal:
                if refusal.code is Code.NOT_FOUND:
                    clause = _FORGOTTEN
                    continue
                left.append(Finding(_UNDO, f"not removed: {explained(refusal)}", self._calls.last))
            except (AssertionError, OSError, grpc.RpcError) as error:
                left.append(Finding(_UNDO, f"not removed: {explained(error)}", self._calls.last))
        for each in self._host.mounts_below(self._root):
            left.append(Finding(clause, f"not removed: {each} was still mounted"))
            self._host.unmount(each)
        _remove_directories(self._root)
        if self._root.exists():
            left.append(Finding(_DIRECTORY, f"not removed: {self._root} is not empty"))
        return left


def _remove_directories(root: Path) -> None:
    """Directories only: a file below the targets belongs to the driver, or to a volume."""
    for directory, _, _ in os.walk(root, topdown=False):
        with contextlib.suppress(OSError):
            Path(directory).rmdir()
