"""One sandbox: a microVM, its volumes and its containers.

The containers of a sandbox share its VM and the single mount of each volume: a container gets a bind mount of it. A
volume stays mounted from its first use until the sandbox ends, as a pod's volumes do. A VM that dies ends its
sandbox: the kernel has released the locks of its claims by then, so no clean-up is needed.

If the VM holds the claim of a volume but mounting it (or undoing the mount) failed, the failure is reported as the
volume's condition, and the next container that uses the volume retries the mount. A pod that runs starts no other
one, so a volume that did not answer when it was to be adopted is tried again (`keep_adopting`).
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crust.core import errors, volumes
from crust.handoff import claims
from crust.handoff.record import Record
from crust.runtime_handler.blocking import NotDeferred, kept_vm
from examples.kata.runtime import messages, ports, volume
from examples.kata.vm import values

_log = logging.getLogger(__name__)

_MOUNT_TIMEOUT_S = 30.0
"""How long a stop waits for a mount that is under way before it kills a guest that does not answer."""


_HELD_S, _HELD_PAUSE_S = 2.0, 0.02
"""How long a stop waits for the keeper, which sees the end of its VM a moment later, and between two looks."""


AGAIN_S = 15.0
"""After that a volume that did not answer is tried again."""


class MountSourceNotDeferred(errors.Unsupported):
    """A mount source is not a deferred volume."""

    def __init__(self, source: str) -> None:
        super().__init__(
            f"the mount source {source} cannot be given to a microVM",
            why="it is not a deferred volume, and this runtime shares no host directories",
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
        self._unanswered: dict[volumes.TargetPath, Record] = {}
        self._mounting: Counter[volumes.TargetPath] = Counter()
        self._lock = asyncio.Lock()
        self._in_hand = volume.ClaimsInHand()
        # Not the pid: daemons in a container may share it, and a guest may still run an earlier one's commands.
        self._names = (f"c{secrets.token_hex(4)}-{n}" for n in itertools.count(1))
        self.ending = False

    @property
    def held(self) -> Sequence[volume.SandboxVolume]:
        """The volumes that the sandbox has mounted."""
        return tuple(self._volumes.values())

    @property
    def mount_failures(self) -> Mapping[volumes.TargetPath, errors.CrustError]:
        """The volumes that the VM holds but could not mount, with the reason."""
        return self._mount_failures

    def volume_at(self, target: volumes.TargetPath) -> volume.SandboxVolume | None:
        """The mounted volume with that target path, or None."""
        return self._volumes.get(target)

    async def wait_for_mount(self, target: volumes.TargetPath) -> None:
        """Wait for a mount of the volume that is under way."""
        if target in self._mounting:
            async with self._lock:
                return

    async def adopt(self) -> None:
        """Adopt the volumes that the VM held before this process started; a failure of one does not stop the others.

        It asks their holder and does not read claim.json: a held lock may be the proxy's, which is unpublishing
        the entry. Raises QemuCommandFailed, QmpDisconnected, and the errors of `recover_claims`.
        """
        await self.recover_claims()
        held = await self.vm.descriptors.held()
        records = await asyncio.to_thread(self._handoff.records)
        by_serial = {volume.serial_of(record): record for record in records}
        for serial in sorted(held):
            record = by_serial.get(serial)
            if record is None:
                _log.error("VM holds a volume without handoff entry", extra={"serial": serial})
                continue
            try:
                await self.use(record)
            except errors.CrustError as error:
                if isinstance(error, errors.PeerUnavailable):
                    self._unanswered[record.target] = record
                extra = {"target": record.target.text, "error": error}
                _log.error("volume not adopted", extra=extra)

    async def keep_adopting(self) -> None:
        """Adopt the volumes whose guest or cluster did not answer at first, until each is adopted or refused."""
        while self._unanswered:
            await asyncio.sleep(AGAIN_S)
            for target, record in tuple(self._unanswered.items()):
                extra: dict[str, object] = {"target": target.text}
                try:
                    await self.use(record)
                except errors.PeerUnavailable:
                    continue
                except errors.CrustError as error:
                    _log.error("volume not adopted", extra={**extra, "error": error})
                else:
                    _log.info("volume adopted", extra=extra)
                del self._unanswered[target]

    async def keep_claims(self) -> None:
        """Have the claims again whenever keeper and standby have both ended; until the VM has, or is cancelled."""
        while self.vm.runs():
            await self.vm.descriptors.lost()
            has_claims = await self._has_claims()
            while self.vm.runs() and not has_claims:
                await asyncio.sleep(AGAIN_S)
                has_claims = await self._has_claims()

    async def _has_claims(self) -> bool:
        """Whether a keeper has all claims again; False if that must be tried again, unless the VM has ended."""
        extra: dict[str, object] = {"sandbox": self.sandbox_id}
        try:
            await self.recover_claims()
        except kept_vm.VmKilled as error:
            _log.error("VM killed", extra={**extra, "error": error})
            return False
        except errors.CrustError as error:
            if self.vm.runs():
                _log.error("claims not taken again", extra={**extra, "error": error})
            return False
        return True

    async def recover_claims(self) -> None:
        """Have a keeper hold the claims of all plugged disks, and those that name the VM (specs/handoff.md, H-46).

        The latter are of volumes that a daemon was just attaching. It does not wait for a mount that is under way,
        which may take hours: `ClaimsInHand`. Raises as `kept_vm.KeptVm.recover`.
        """
        socket = self.vm.descriptors.keeper_socket
        if socket is None:
            return
        async with self._in_hand.lock:
            used, process = await self._targets_of(await self.vm.plugged()), self.vm.named_process
            claimed = await asyncio.to_thread(self._handoff.claimed_for, process)
            used |= {volume.serial_of(record): record.target for record in claimed}
            in_hand = self._in_hand.now()
            lost = ports.LostClaims(self.sandbox_id, process, socket, used, in_hand)
            await asyncio.to_thread(self._handoff.recover, lost)

    async def _targets_of(self, serials: Sequence[str]) -> dict[str, volumes.TargetPath | None]:
        """The target path of each disk; None if it has no entry, and this process does not know it."""
        known = {held.serial: held.target for held in self._volumes.values()}
        records = await asyncio.to_thread(self._handoff.records)
        known |= {volume.serial_of(record): record.target for record in records}
        return {serial: known.get(serial) for serial in serials}

    async def start(self, request: messages.Run) -> ports.Container:
        """Mount the volumes of a container, then start it. Raises the error of the first volume that fails."""
        if self.ending:
            raise SandboxStopping(self.sandbox_id)
        wanted = await asyncio.to_thread(self._resolve, request.mounts)
        binds = [
            values.Bind(
                volume=(await self.use(resolved.record)).serial,
                destination=resolved.mount.destination,
                sub_path=resolved.sub_path,
                read_only=resolved.mount.readonly or resolved.record.readonly,
            )
            for resolved in wanted
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
        """End containers, unmount, power off; then release the claims. Kills a guest that hangs."""
        self.ending = True
        await self._wait_for_mounts()
        async with self._lock:
            stuck = await self.vm.stop()
            if stuck:
                _log.warning("not unmounted", extra={"sandbox": self.sandbox_id, "volumes": stuck})
            if not self.vm.runs():
                ended = self.vm.identity.uuid
                await volume.give_back_of_ended(self._handoff, lambda taken: taken.vm_id == ended)
            await self._release_claims()

    async def _wait_for_mounts(self) -> None:
        """Wait for mounts under way; kill a guest in which they hang."""
        try:
            async with asyncio.timeout(_MOUNT_TIMEOUT_S), self._lock:
                return
        except TimeoutError:
            _log.warning("VM killed during a mount", extra={"sandbox": self.sandbox_id})
            await self.vm.kill()

    async def _release_claims(self) -> None:
        """Release the claims of a VM that has ended."""
        for held in self._volumes.values():
            try:
                await self._release(held.claim)
            except errors.CrustError as error:
                _log.warning("claim kept", extra={"target": held.target.text, "error": error})
        self._volumes.clear()
        self._mount_failures.clear()

    async def _release(self, claim: ports.Claim) -> None:
        """Release a claim; what holds it ends with the VM."""
        ends_s = time.monotonic() + _HELD_S
        while True:
            try:
                await asyncio.to_thread(claim.release)
                return
            except claims.HeldBySandbox:
                if self.vm.runs() or time.monotonic() > ends_s:
                    raise
            await asyncio.sleep(_HELD_PAUSE_S)

    async def use(self, record: Record) -> volume.SandboxVolume:
        """Claim and mount the volume, if the sandbox does not have it. Raises the error of the step that failed."""
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
                mounted = await volume.claim_and_mount(
                    self._handoff, record, self.sandbox_id, self.vm, self._in_hand
                )
            except errors.CrustError as error:
                await self._note_failure(record, error)
                raise
            self._mount_failures.pop(record.target, None)
            self._volumes[record.target] = mounted
            return mounted

    async def _note_failure(self, record: Record, error: errors.CrustError) -> None:
        """Remember a failed mount if the VM still holds the volume's claim."""
        try:
            held = await self.vm.descriptors.held()
        except errors.CrustError:  # the VM itself has failed
            return
        if volume.serial_of(record) in held:
            self._mount_failures[record.target] = error
        else:
            self._mount_failures.pop(record.target, None)

    def _resolve(self, mounts: Sequence[messages.Mount]) -> list[_Wanted]:
        """Resolve all sources before any volume is claimed."""
        wanted = []
        for mount in mounts:
            resolved = self._handoff.resolve(mount.source)
            if isinstance(resolved, NotDeferred):
                raise MountSourceNotDeferred(mount.source)
            wanted.append(_Wanted(resolved.record, mount, resolved.sub_path))
        return wanted
