"""All sandboxes of the node: started, stopped, and taken over from a daemon that died.

    <directory>/<id>/      the machine's own directory (examples.kata.vm.machine)

A daemon that starts looks there: a VM that runs is adopted with its volumes, and what is left of one that does not is
cleared away. One that runs and cannot be adopted (its guest hangs) is a stray: it keeps its claims, hinders nobody
else, and can only be stopped.

Starting and stopping a sandbox are operations under its id: one at a time, joined by who asks the same, finished
when their client leaves. A directory is removed before its id is free again, and never while the VM runs, because
without it nobody could find that VM, which holds its claims.
"""

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from crust import errors, operations, volumes
from examples.kata.runtime import ports
from examples.kata.runtime.sandbox import Sandbox
from examples.kata.vm import faults

_log = logging.getLogger(__name__)


class SandboxNotAdopted(errors.NotReady):
    """A VM of that id runs, and this daemon could not take it over."""

    def __init__(self, sandbox: str, reason: errors.CrustError) -> None:
        super().__init__(
            f"sandbox {sandbox} cannot be used",
            why=f"its VM was not taken over: {reason}",
            hint=f"stop it: python -m examples.kata stop {sandbox}",
        )


class SandboxStillRuns(errors.NotReady):
    """A VM that should have ended has not."""

    def __init__(self, sandbox: str, pid: int) -> None:
        super().__init__(
            f"sandbox {sandbox} is not stopped", why=f"its QEMU runs, process {pid}", hint="retry"
        )


class Sandboxes:
    """The sandboxes by id, each with a directory of its own below `directory`."""

    def __init__(self, directory: Path, vms: ports.Vms, handoff: ports.Handoff) -> None:
        self._base = directory
        self._vms = vms
        self._handoff = handoff
        self._sandboxes: dict[volumes.SandboxId, Sandbox] = {}
        self._not_adopted: dict[volumes.SandboxId, errors.CrustError] = {}
        self._running = operations.KeyedOperations()
        self._watchers: set[asyncio.Task[None]] = set()

    async def adopt_all(self) -> None:
        """Take over the VMs that run, with their volumes; clear away what is left of the others."""
        await asyncio.to_thread(self._base.mkdir, mode=0o700, parents=True, exist_ok=True)
        directories = await asyncio.to_thread(lambda: sorted(self._base.iterdir()))
        await asyncio.gather(*map(self._adopt, directories))

    async def get(self, sandbox_id: volumes.SandboxId) -> Sandbox:
        """The sandbox; starts it if it does not exist.

        Raises VmStartFailed, `SandboxNotAdopted`, and `operations.OperationInProgress` while it is being stopped.
        """
        found = self._sandboxes.get(sandbox_id)
        if found is not None:
            return found
        return await self._running.run(
            _key(sandbox_id), "start", None, lambda: self._start(sandbox_id)
        )

    async def stop(self, sandbox_id: volumes.SandboxId) -> None:
        """Stop a sandbox, and first wait for it if it just starts; absent is success. Raises `SandboxStillRuns`."""
        while True:
            try:
                await self._running.run(
                    _key(sandbox_id), "stop", None, lambda: self._stop(sandbox_id)
                )
                return
            except operations.OperationInProgress:
                with contextlib.suppress(errors.CrustError):
                    await self.get(sandbox_id)  # joins the start that runs

    async def close(self) -> None:
        """Finish what is being started and stopped, and let go of every VM; they run on."""
        await self._running.drain()
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await asyncio.gather(*(sandbox.vm.close() for sandbox in self._sandboxes.values()))

    def all(self) -> Sequence[Sandbox]:
        """Every sandbox, by id."""
        return [self._sandboxes[each] for each in sorted(self._sandboxes)]

    def not_adopted(self) -> Sequence[volumes.SandboxId]:
        """The ids of VMs that run and were not taken over."""
        return sorted(self._not_adopted)

    async def _adopt(self, directory: Path) -> None:
        sandbox_id = volumes.SandboxId(directory.name)
        try:
            await self._take_over(sandbox_id)
        except errors.CrustError as error:  # the others must not wait for a person
            self._not_adopted[sandbox_id] = error
            extra = {"sandbox": sandbox_id, "error": str(error)}
            _log.error("sandbox not adopted", extra=extra)

    async def _take_over(self, sandbox_id: volumes.SandboxId) -> None:
        try:
            vm = await self._vms.adopt(self._directory(sandbox_id))
        except (
            faults.VmGone
        ):  # its QEMU may be there all the same, halted for good by its accelerator
            await self._destroy(sandbox_id)
            return
        sandbox = Sandbox(sandbox_id, vm, self._handoff)
        try:
            await sandbox.adopt()
        except errors.CrustError:
            await vm.close()
            raise
        self._add(sandbox)
        extra = {"sandbox": sandbox_id, "volumes": len(sandbox.held)}
        _log.info("adopted", extra=extra)

    async def _start(self, sandbox_id: volumes.SandboxId) -> Sandbox:
        if sandbox_id in self._not_adopted:
            raise SandboxNotAdopted(sandbox_id, self._not_adopted[sandbox_id])
        directory = self._directory(sandbox_id)
        try:
            vm = await self._vms.start(sandbox_id, directory)
        except faults.VmStartFailed:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
            raise
        sandbox = Sandbox(sandbox_id, vm, self._handoff)
        self._add(sandbox)
        return sandbox

    async def _stop(self, sandbox_id: volumes.SandboxId) -> None:
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is not None:
            await sandbox.stop()
            if sandbox.vm.runs():
                raise SandboxStillRuns(sandbox_id, sandbox.vm.pid)
            await self._remove(sandbox_id)
            del self._sandboxes[sandbox_id]
        elif sandbox_id in self._not_adopted:
            await self._destroy(sandbox_id)
            del self._not_adopted[sandbox_id]

    async def _destroy(self, sandbox_id: volumes.SandboxId) -> None:
        with contextlib.suppress(faults.VmGone):
            await self._vms.destroy(self._directory(sandbox_id))
        await self._remove(sandbox_id)

    async def _remove(self, sandbox_id: volumes.SandboxId) -> None:
        directory = self._directory(sandbox_id)
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    def _add(self, sandbox: Sandbox) -> None:
        self._sandboxes[sandbox.sandbox_id] = sandbox
        watcher = asyncio.create_task(self._watch(sandbox), name=f"watch {sandbox.sandbox_id}")
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _watch(self, sandbox: Sandbox) -> None:
        """A VM that ends by itself takes its sandbox along."""
        await sandbox.vm.wait()
        if sandbox.ending:
            return
        _log.error("VM ended by itself", extra={"sandbox": sandbox.sandbox_id})
        with contextlib.suppress(operations.ShuttingDown):  # then the next daemon clears it away
            await self.stop(sandbox.sandbox_id)

    def _directory(self, sandbox_id: volumes.SandboxId) -> Path:
        return self._base / sandbox_id


def _key(sandbox_id: volumes.SandboxId) -> str:
    return f"sandbox {sandbox_id}"
