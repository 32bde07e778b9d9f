"""All sandboxes of the node: started, stopped, and adopted from an earlier daemon.

    <directory>/<id>/      the directory of one VM (examples.kata.vm.machine)

A daemon that starts scans the directory: it adopts each VM that runs, with its volumes, and removes the directories
of VMs that have ended. A VM that runs and cannot be adopted, because its guest hangs, keeps its claims, blocks no
other sandbox, and can only be stopped.

Starting and stopping a sandbox are operations keyed by its id: one at a time, joined by identical requests, finished
even if the client disconnects. The directory is removed before the id is free again, and never while the VM runs:
without the directory no daemon could find the VM, which holds its claims.
"""

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from crust.core import errors, operations, volumes
from crust.host.process.workers import Workers
from crust.runtime_handler.blocking import kept_vm
from examples.kata.runtime import ports, volume
from examples.kata.runtime.sandbox import Sandbox
from examples.kata.runtime.taken_images import Taken
from examples.kata.vm import faults

_log = logging.getLogger(__name__)


class SandboxNotAdopted(errors.NotReady):
    """A VM with that id runs, and this daemon could not adopt it."""

    def __init__(self, sandbox: str, reason: errors.CrustError) -> None:
        super().__init__(
            f"sandbox {sandbox} cannot be used",
            why=f"its VM could not be adopted: {reason}",
            hint=f"stop it: python -m examples.kata stop {sandbox}",
        )


class SandboxStillRuns(errors.NotReady):
    """A VM still runs after it was stopped."""

    def __init__(self, sandbox: str, pid: int) -> None:
        super().__init__(
            f"sandbox {sandbox} is not stopped",
            why=f"its QEMU still runs, process {pid}",
            hint="retry",
        )


class Sandboxes:
    """The sandboxes by id, each with a directory of its own below `directory`."""

    def __init__(self, directory: Path, vms: ports.Vms, handoff: ports.Handoff) -> None:
        self._base = directory
        self._vms = vms
        self.handoff = handoff
        self._sandboxes: dict[volumes.SandboxId, Sandbox] = {}
        self._not_adopted: dict[volumes.SandboxId, errors.CrustError] = {}
        self._running = operations.KeyedOperations(Workers("the sandboxes"))
        self._watchers: set[asyncio.Task[None]] = set()

    async def adopt_all(self) -> None:
        """Adopt the VMs that run, with their volumes; remove the directories of the others."""
        await asyncio.to_thread(self._base.mkdir, mode=0o700, parents=True, exist_ok=True)
        directories = await asyncio.to_thread(lambda: sorted(self._base.iterdir()))
        await asyncio.gather(*map(self._adopt, directories))

    async def get(self, sandbox_id: volumes.SandboxId) -> Sandbox:
        """The sandbox; starts it if it does not exist.

        Raises VmStartFailed, `SandboxNotAdopted`, and `operations.OperationInProgress` while it is being stopped.
        """
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is not None:
            return sandbox
        return await self._running.run(
            _key(sandbox_id), "start", None, lambda: self._start(sandbox_id)
        )

    async def stop(self, sandbox_id: volumes.SandboxId) -> None:
        """Stop a sandbox; waits for a start under way; absent is success. Raises `SandboxStillRuns`."""
        while True:
            try:
                await self._running.run(
                    _key(sandbox_id), "stop", None, lambda: self._stop(sandbox_id)
                )
                return
            except operations.OperationInProgress:
                with contextlib.suppress(errors.CrustError):
                    await self.get(sandbox_id)  # joins the start that is under way

    async def close(self) -> None:
        """Finish starts and stops under way, and release control of every VM; the VMs continue to run."""
        await self._running.drain()
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await asyncio.gather(*(sandbox.vm.close() for sandbox in self._sandboxes.values()))

    async def give_back_left(self) -> None:
        """End the claims on images that VMs have left which have ended; to be called when keys can be had.

        Such a VM is neither in `all` nor in `not_adopted`; a VM that is just starting has not taken anything.
        """
        await volume.give_back_of_ended(self.handoff, self._has_ended)

    def all(self) -> Sequence[Sandbox]:
        """Every sandbox, by id."""
        return [self._sandboxes[sandbox] for sandbox in sorted(self._sandboxes)]

    def not_adopted(self) -> Sequence[volumes.SandboxId]:
        """The ids of VMs that run and could not be adopted."""
        return sorted(self._not_adopted)

    async def _adopt(self, directory: Path) -> None:
        sandbox_id = volumes.SandboxId(directory.name)
        try:
            await self._take_over(sandbox_id)
        except errors.CrustError as error:  # one failure must not block the other sandboxes
            self._not_adopted[sandbox_id] = error
            extra = {"sandbox": sandbox_id, "error": error}
            _log.error("sandbox not adopted", extra=extra)

    async def _take_over(self, sandbox_id: volumes.SandboxId) -> None:
        try:
            vm = await self._vms.adopt(self._directory(sandbox_id))
        except faults.VmGone:  # its QEMU may still run, halted because its accelerator failed
            await self._destroy(sandbox_id)
            return
        sandbox = Sandbox(sandbox_id, vm, self.handoff)
        try:
            await sandbox.adopt()
        except kept_vm.VmKilled as error:
            _log.error("VM killed", extra={"sandbox": sandbox_id, "error": error})
            await vm.close()
            await self._destroy(sandbox_id)
            return
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
        sandbox = Sandbox(sandbox_id, vm, self.handoff)
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
            await self.give_back_left()

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
        """Remove the sandbox when its VM ends by itself; until then, have its claims kept and its volumes adopted."""
        named = f"of {sandbox.sandbox_id}"
        keeping = asyncio.create_task(sandbox.keep_claims(), name=f"claims {named}")
        adopting = asyncio.create_task(sandbox.keep_adopting(), name=f"volumes {named}")
        try:
            await sandbox.vm.wait()
        finally:
            keeping.cancel()
            adopting.cancel()
            await asyncio.gather(keeping, adopting, return_exceptions=True)
        if sandbox.ending:
            return
        _log.error("VM ended by itself", extra={"sandbox": sandbox.sandbox_id})
        with contextlib.suppress(operations.ShuttingDown):  # then the next daemon removes it
            await self.stop(sandbox.sandbox_id)

    def _has_ended(self, taken: Taken) -> bool:
        running = {sandbox.vm.identity.uuid for sandbox in self._sandboxes.values()}
        return taken.vm_id not in running and taken.sandbox not in self._not_adopted

    def _directory(self, sandbox_id: volumes.SandboxId) -> Path:
        return self._base / sandbox_id


def _key(sandbox_id: volumes.SandboxId) -> str:
    return f"sandbox {sandbox_id}"
