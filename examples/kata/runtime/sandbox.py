"""One sandbox: a microVM, the volumes that it has, the containers in it.

Containers of a sandbox share its VM, and a volume's single mount: a container gets a bind of it. A volume stays from
its first use until the sandbox ends, as a pod's volumes do. A VM that dies ends its sandbox: the kernel has dropped
the claims' locks by then, and nothing needs to be told.

A volume that the VM has and that could not be brought in (or taken out again) is in trouble: it is told of, and the
next container that wants it tries again.
"""

import asyncio
import itertools
import logging
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crust import errors, volumes
from crust.handoff.record import Record
from crust.runtime_handler import NotDeferred
from examples.kata.runtime import messages, ports, volume
from examples.kata.vm import values

_log = logging.getLogger(__name__)

_MOUNT_TIMEOUT_S = 30.0
"""How long a stop waits for a volume that is being brought in, before it kills a guest that does not answer."""


class MountSourceNotDeferred(errors.Unsupported):
    """A mount source that is no deferred volume."""

    def __init__(self, source: str) -> None:
        super().__init__(
            f"the mount source {source} cannot be given to a microVM",
            why="it is no deferred volume, and this runtime shares no directory of the host",
            hint="publish the volume with deferral",
        )


class SandboxStopping(errors.NotReady):
    """The sandbox is being stopped."""

    def __init__(self, sandbox: str) -> None:
        super().__init__(f"sandbox {sandbox} is being stopped", hint="start another one")


@dataclass(frozen=True, slots=True)
class _Wanted:
    record: Record
    mount: messages.Mount
    sub_path: str


class Sandbox:
    """A microVM with its volumes."""

    def __init__(self, sandbox_id: volumes.SandboxId, vm: ports.Vm, handoff: ports.Handoff) -> None:
        self.sandbox_id = sandbox_id
        self.vm = vm
        self._handoff = handoff
        self._volumes: dict[volumes.TargetPath, volume.SandboxVolume] = {}
        self._mount_failures: dict[volumes.TargetPath, errors.CrustError] = {}
        self._mounting: Counter[volumes.TargetPath] = Counter()
        self._lock = asyncio.Lock()
        # In a container every daemon may have the same pid, and a guest may still run its predecessor's commands.
        self._names = (f"c{secrets.token_hex(4)}-{n}" for n in itertools.count(1))
        self.ending = False

    @property
    def held(self) -> Sequence[volume.SandboxVolume]:
        """The volumes that the sandbox has mounted."""
        return tuple(self._volumes.values())

    @property
    def mount_failures(self) -> Mapping[volumes.TargetPath, errors.CrustError]:
        """The volumes that the VM has and that are not mounted as they should be, with the reason."""
        return self._mount_failures

    def volume_at(self, target: volumes.TargetPath) -> volume.SandboxVolume | None:
        """The volume with that target path, if it is here."""
        return self._volumes.get(target)

    async def wait_for_mount(self, target: volumes.TargetPath) -> None:
        """Wait until the volume is not just being brought in."""
        if target in self._mounting:
            async with self._lock:
                return

    async def adopt(self) -> None:
        """Take over the volumes that the VM had before this process began; one that fails does not stop the others.

        QEMU is asked and not claim.json: a lock that is held may be the proxy's, which is just withdrawing the entry.
        Raises what keeps QEMU from telling.
        """
        held = await self.vm.descriptors.held()
        records = await asyncio.to_thread(self._handoff.records)
        by_serial = {volume.serial_of(record): record for record in records}
        for serial in sorted(held):
            record = by_serial.get(serial)
            if record is None:
                _log.error("VM holds a volume that is not handed over", extra={"serial": serial})
                continue
            try:
                await self._use(record)
            except errors.CrustError as error:
                extra = {"target": record.target.text, "error": str(error)}
                _log.error("volume not adopted", extra=extra)

    async def start(self, request: messages.Run) -> ports.Container:
        """Start a container, its volumes brought in first. Raises what refuses any of them."""
        if self.ending:
            raise SandboxStopping(self.sandbox_id)
        wanted = await asyncio.to_thread(self._resolve, request.mounts)
        binds = [
            values.Bind(
                volume=(await self._use(each.record)).serial,
                destination=each.mount.destination,
                sub_path=each.sub_path,
                read_only=each.mount.readonly or each.record.readonly,
            )
            for each in wanted
        ]
        return await self.vm.guest.start(
            values.ContainerSpec(
                name=next(self._names),
                command=request.argv,
                binds=tuple(binds),
                environment=request.env,
            )
        )

    async def stop(self) -> None:
        """End containers, unmount, power off; then give the claims up. A guest that hangs is killed."""
        self.ending = True
        await self._wait_for_mounts()
        async with self._lock:
            stuck = await self.vm.stop()
            if stuck:
                _log.warning("not unmounted", extra={"sandbox": self.sandbox_id, "volumes": stuck})
            await self._forget()

    async def _wait_for_mounts(self) -> None:
        """Let what is being brought in end; in a guest that hangs only killing it ends that."""
        try:
            async with asyncio.timeout(_MOUNT_TIMEOUT_S), self._lock:
                return
        except TimeoutError:
            _log.warning("killed while a volume came in", extra={"sandbox": self.sandbox_id})
            await self.vm.kill()

    async def _forget(self) -> None:
        """Give up the claims of a VM that has ended."""
        for held in self._volumes.values():
            try:
                await asyncio.to_thread(held.claim.release)
            except errors.CrustError as error:
                _log.warning("claim kept", extra={"target": held.target.text, "error": str(error)})
        self._volumes.clear()
        self._mount_failures.clear()

    async def _use(self, record: Record) -> volume.SandboxVolume:
        self._mounting[record.target] += 1
        try:
            return await self._claim_and_mount(record)
        finally:
            self._mounting -= Counter((record.target,))

    async def _claim_and_mount(self, record: Record) -> volume.SandboxVolume:
        async with self._lock:
            if self.ending:
                raise SandboxStopping(self.sandbox_id)
            known = self._volumes.get(record.target)
            if known is not None:
                return known
            try:
                taken = await volume.claim_and_mount(
                    self._handoff, record, self.sandbox_id, self.vm
                )
            except errors.CrustError as error:
                await self._note(record, error)
                raise
            self._mount_failures.pop(record.target, None)
            self._volumes[record.target] = taken
            return taken

    async def _note(self, record: Record, error: errors.CrustError) -> None:
        """Remember a failure whose volume stayed with the VM."""
        try:
            held = await self.vm.descriptors.held()
        except errors.CrustError:  # it is the VM that is in trouble
            return
        if volume.serial_of(record) in held:
            self._mount_failures[record.target] = error
        else:
            self._mount_failures.pop(record.target, None)

    def _resolve(self, mounts: Sequence[messages.Mount]) -> list[_Wanted]:
        """All sources, before any volume is touched."""
        wanted = []
        for mount in mounts:
            found = self._handoff.resolve(mount.source)
            if isinstance(found, NotDeferred):
                raise MountSourceNotDeferred(mount.source)
            wanted.append(_Wanted(found.record, mount, found.sub_path))
        return wanted
