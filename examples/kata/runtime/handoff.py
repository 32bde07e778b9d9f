"""The handoff directory under this handler's name: crust's SDK with its two constant arguments filled in.

The name is this runtime's own and never the record's. A volume that was handed to another handler is refused, because
the proxy would send its calls about the volume to that handler.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from crust.core import deferral_keys, volumes
from crust.handoff import claims, layout, store
from crust.handoff.record import Record
from crust.runtime_handler import blocking
from crust.runtime_handler.blocking import kept_vm
from crust.runtime_handler.registration import Registration
from examples.kata.runtime import ceph_images, ports
from examples.kata.runtime.taken_images import Taken


@dataclass(frozen=True, slots=True)
class Directory:
    """`ports.Handoff` at `root`, for the handler registered as `handler`."""

    root: str
    handler: volumes.HandlerName
    registration: Registration
    images: ceph_images.CephImages

    def resolve(self, source: str) -> blocking.Resolved | blocking.NotDeferred:
        """See `blocking.resolve_source`."""
        return blocking.resolve_source(self.root, source)

    def claim(
        self,
        target: volumes.TargetPath,
        sandbox: volumes.SandboxId,
        vm: blocking.Process | None = None,
    ) -> blocking.Claim:
        """See `blocking.claim_volume`."""
        features = self.registration.features
        return blocking.claim_volume(
            self.root, target, sandbox, self.handler, features=features, process=vm
        )

    def adopt(
        self, target: volumes.TargetPath, sandbox: volumes.SandboxId, holder_pid: int
    ) -> blocking.Claim:
        """See `blocking.adopt_volume`."""
        return blocking.adopt_volume(self.root, target, sandbox, self.handler, holder_pid)

    async def secrets(self, target: volumes.TargetPath) -> Mapping[str, str]:
        """See `runtime_handler.registration.Registration.secrets_of`."""
        return await self.registration.secrets_of(target)

    @asynccontextmanager
    async def taking(
        self, record: Record, vm_id: str, sandbox: volumes.SandboxId
    ) -> AsyncIterator[ports.TakenImage]:
        """See `ceph_images.CephImages.taking`."""
        secrets = await self.secrets(record.target)
        async with self.images.taking(
            record, secrets[deferral_keys.USER_KEY], vm_id, sandbox
        ) as it:
            yield it

    async def give_back(self, record: Record, vm_id: str, sandbox: volumes.SandboxId) -> None:
        """See `ceph_images.CephImages.give_back`."""
        assert record.image is not None
        await self._know_key(record.target)
        await self.images.give_back(Taken(vm_id, sandbox, record.target, record.image))

    def taken(self) -> Sequence[Taken]:
        """See `ceph_images.CephImages.taken`."""
        return self.images.taken()

    async def give_back_of_ended(self, taken: Taken) -> None:
        """The same when the VM has ended: only a claimant gets the key, so we claim the volume for a moment.

        If somebody else has claimed it, that is tried again later. Without the entry no key is to be had any more:
        the note is removed, and the claim stays in the cluster.
        """
        if self.images.knows(taken.target):
            await self.images.give_back(taken)
            return
        try:
            image = await self._know_key_by_claim(taken)
        except claims.NotPublished:
            await self.images.forget(taken)
            raise
        await self.images.give_back(dataclasses.replace(taken, image=image))

    async def image_size(self, record: Record) -> int:
        """See `ceph_images.CephImages.size_bytes`."""
        await self._know_key(record.target)
        return await self.images.size_bytes(record)

    async def _know_key(self, target: volumes.TargetPath) -> None:
        """Have the key for a claimed volume's image, which a daemon before this one may have taken."""
        if not self.images.knows(target):
            secrets = await self.secrets(target)
            self.images.remember(target, secrets[deferral_keys.USER_KEY])

    async def _know_key_by_claim(self, taken: Taken) -> volumes.NetworkImage:
        """Have the key; returns the image with the user and the monitors that it has now."""
        records = await asyncio.to_thread(self.records)
        now = next((record.image for record in records if record.target == taken.target), None)
        if now is None or now.identity != taken.image.identity:  # or another volume is there now
            raise claims.NotPublished(taken.target)
        claim = await asyncio.to_thread(self.claim, taken.target, taken.sandbox)
        try:
            await self._know_key(taken.target)
        finally:
            await asyncio.to_thread(claim.release)
        return now

    def recover(self, lost: ports.LostClaims) -> None:
        """See `blocking.kept_vm.KeptVm.recover`."""
        vm = kept_vm.KeptVm(self.root, self.handler, lost.sandbox, lost.vm, lost.keeper_socket)
        vm.recover(lost.used, lost.in_hand).close()

    def records(self) -> Sequence[Record]:
        """Every readable record, of any handler."""
        entries = store.Store(self.root).scan()
        return tuple(entry.record for entry in entries if entry.record is not None)

    def claimed_for(self, vm: blocking.Process) -> Sequence[Record]:
        """See `ports.Handoff`."""
        entries = store.Store(self.root).scan()
        return tuple(
            entry.record
            for entry in entries
            if entry.record is not None and self._process_of(entry) == vm
        )

    def _process_of(self, entry: store.Entry) -> blocking.Process | None:
        """The process that the claim names; a claimant that looks at a dead one has put it aside."""
        claim = entry.claim
        if claim is not None and not claim.sandbox_id:
            claim = claims.read_aside(layout.Layout(self.root).entry(entry.digest))
        return claim.process if claim is not None else None
