"""Notices that the shim of a sandbox has ended while its virtual machine goes on: the sandbox is orphaned.

The container engine starts a shim for each sandbox, with `-id SANDBOX` among its arguments, and never a second one.
Without it nobody can stop the sandbox, and the engine reports it as removed; the machine keeps the volume. claim.json
says so then, which `crust volumes`, `crust doctor` and `crust end-orphan` read. Nothing is ended here.
"""

import asyncio
import contextlib
import logging
import os
import select
import time
from collections.abc import Callable, Mapping

from crust.core import errors, volumes
from crust.host.process import arguments, workers
from crust.kata.grants import Grants, Sandbox
from crust.runtime_handler import keepers

_log = logging.getLogger(__name__)

_GRACE_S = 5.0
"""A sandbox that is stopped loses machine and shim at once, in either order."""


class Shims:
    """The shims of the sandboxes that have a keeper. `hint` is called when one ends."""

    def __init__(self, grants: Grants, hint: Callable[[], None]) -> None:
        self._grants, self._hint = grants, hint
        self._ends: dict[str, int] = {}
        self._gone_s: dict[str, float] = {}
        self._reported: set[str] = set()

    async def look(self, kept: Mapping[str, keepers.Keeper]) -> None:
        """Look once, at the sandboxes of these keepers."""
        for sandbox_id in {*self._ends, *self._gone_s, *self._reported} - kept.keys():
            self._forget(sandbox_id)
        for sandbox_id, keeper in kept.items():
            if sandbox_id in self._reported or await self._has_shim(sandbox_id):
                continue
            since = self._gone_s.setdefault(sandbox_id, time.monotonic())
            if time.monotonic() - since >= _GRACE_S:
                self._reported.add(sandbox_id)
                await workers.run(self._report, sandbox_id, keeper.vm_pid)

    def close(self) -> None:
        """End the watches."""
        for sandbox_id in list(self._ends):
            self._forget(sandbox_id)

    async def _has_shim(self, sandbox_id: str) -> bool:
        end = self._ends.get(sandbox_id)
        if end is not None and not select.select([end], [], [], 0)[0]:
            return True
        self._forget(sandbox_id, is_kept=True)
        found = await workers.run(shim_of, sandbox_id)
        if found is None:
            return False
        self._gone_s.pop(sandbox_id, None)
        self._ends[sandbox_id] = found
        asyncio.get_running_loop().add_reader(found, self._ended, found)
        return True

    def _ended(self, end: int) -> None:
        asyncio.get_running_loop().remove_reader(end)  # it stays readable
        self._hint()

    def _forget(self, sandbox_id: str, *, is_kept: bool = False) -> None:
        if (end := self._ends.pop(sandbox_id, None)) is not None:
            asyncio.get_running_loop().remove_reader(end)
            os.close(end)
        if not is_kept:
            self._gone_s.pop(sandbox_id, None)
            self._reported.discard(sandbox_id)

    def _report(self, sandbox_id: str, vm_pid: int) -> None:
        sandbox = Sandbox(volumes.SandboxId(sandbox_id), vm_pid)
        problem = errors.NotReady.named(
            "SandboxOrphaned",
            f"sandbox {sandbox_id} is lost to its container engine",
            why=f"its shim has ended, and its virtual machine, process {vm_pid}, goes on with the volume",
            hint="make sure that its pod has ended (`crictl pods`); then `crust end-orphan VOLUME` ends the machine",
        )
        with contextlib.suppress(errors.CrustError):  # the machine has ended
            self._grants.report_orphaned(sandbox, problem)
            _log.error("a virtual machine goes on without its shim", extra={"error": problem})


def shim_of(sandbox_id: str) -> int | None:
    """A pidfd of the sandbox's shim; None if there is none."""
    for pid in arguments.having("-id", sandbox_id):
        with contextlib.suppress(ProcessLookupError):
            return os.pidfd_open(pid)
    return None
