"""A sandbox's claim of a volume, in its keeper, and Kata's real entry for as long as a container needs it.

The claim is taken as every runtime takes it (specs/handoff.md): before the hypervisor has the device, bound to the
hypervisor's process, freed by its end alone. A sandbox has one keeper, at a socket that its id names, so a restarted
daemon asks the keepers. Beside the socket is the process that it was made for: when both processes of a keeper were
killed, only that process's end, as the kernel says it, ends the claims. Functions block; the caller lets one thread
at a time work on one volume.
"""

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from crust.core import errors, volumes
from crust.handoff import claims
from crust.handoff.layout import EntryPaths
from crust.handoff.record import Record
from crust.handoff.store import Store
from crust.host.block import openers
from crust.host.files import durable
from crust.kata import entry
from crust.runtime_handler.blocking import (
    Claim,
    ClaimLost,
    Process,
    adopt_volumes,
    claim_volumes,
    hand_over_claims,
    keepers,
    kept_vm,
)

Revocation = Callable[[], None]
User = str
"""A created container that needs an entry, as the keeper is told of it."""

_SUFFIX, _MACHINE = ".sock", ".vm"
_MACHINE_BYTES = 256


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A sandbox and the process of its virtual machine."""

    id: volumes.SandboxId
    process: Process


@dataclass(eq=False)
class Grants:
    """The claims of this node's Kata sandboxes, also of handlers that the settings do not name any more."""

    store: Store
    sockets: Path
    entries: entry.KataEntries

    def socket(self, sandbox_id: str) -> Path:
        return self.sockets / f"{sandbox_id}{_SUFFIX}"

    def sandbox_ids(self) -> list[str]:
        """Sandboxes that have, or had, a keeper."""
        names = (name for name in os.listdir(self.sockets) if name.endswith(_SUFFIX))
        return sorted(name.removesuffix(_SUFFIX) for name in names)

    def machine(self, sandbox_id: str) -> Process | None:
        """The process for which the sandbox's keeper was started; None if that is not known."""
        path = self._machine_path(sandbox_id)
        data = durable.find(path, limit_bytes=_MACHINE_BYTES)
        if data is None:
            return None
        try:
            return Process(**json.loads(data))
        except (ValueError, TypeError) as err:
            raise errors.Corrupt.named(
                "MachineUnreadable",
                f"{path} does not say which process is the virtual machine",
                why=str(err),
            ) from err

    def forget(self, sandbox_id: str) -> None:
        """Remove the socket of a sandbox whose machine has ended."""
        durable.remove(self.socket(sandbox_id), survives_power_cut=False)
        durable.remove(self._machine_path(sandbox_id), survives_power_cut=False)

    def _machine_path(self, sandbox_id: str) -> Path:
        return self.sockets / f"{sandbox_id}{_MACHINE}"

    def _paths(self, record: Record) -> EntryPaths:
        return self.store.layout.entry(record.target)

    def grant(
        self,
        sandbox: Sandbox,
        mounts: Mapping[str, Record],
        user: User,
        features: Collection[volumes.HandlerFeature],
    ) -> Revocation:
        """Have Kata find the device at each mount source of `user`, or at none; returns what undoes this call only.

        `features` are those of the sandbox's Kata. Raises `KataPathTooLong`, `KataEntryForeign`, and as
        `claim_volumes`.
        """
        names = {entry.name_of(key): record for key, record in mounts.items()}
        records = {record.digest: record for record in mounts.values()}
        with contextlib.ExitStack() as undo:
            claimed = self._claimed(sandbox, records)
            missing = [record for digest, record in records.items() if digest not in claimed]
            read = [(record, claims.read(self._paths(record))) for record in missing]
            if self._used(sandbox, [(r, claim) for r, claim in read if not (claim and claim.live)]):
                self.recover(sandbox)
                claimed = self._claimed(sandbox, records)
            missing = [records[digest] for digest in records if digest not in claimed]
            if missing:
                claimed.update(self._claim(sandbox, missing, features, undo))
            with self._connected(sandbox.id) as keeper, keeper.together():
                for name, published in names.items():
                    record = claimed[published.digest]
                    kind, file = self.entries.place(name, record), self.entries.file(name)
                    put = keeper.put_files.get(file)
                    if put is not None and user in put.users and kind is entry.Kind.REAL:
                        continue  # by an earlier call
                    new, back = self.entries.staged(name, record)
                    undo.callback(self._withdraw_file, sandbox.id, file, user)
                    keeper.put(record.digest, file, new=new, back=back, user=user)
            return undo.pop_all().close

    @contextlib.contextmanager
    def adopted(self, sandbox: Sandbox, records: Mapping[str, Record]) -> Iterator[list[Claim]]:
        """The claims of the records, by their digests, adopted while the block runs.

        Raises `VolumeNotClaimed` unless the sandbox has each of them by a keeper of its machine.
        """
        with self._held(sandbox, records) as adopted:
            held = {claim.record.digest for claim in adopted}
            for record in (record for digest, record in records.items() if digest not in held):
                raise errors.NotReady.named(
                    "VolumeNotClaimed",
                    f"the volume at {record.target} is not claimed for sandbox {sandbox.id}",
                    why="crust keeper does not hold it: the container was created while crust kata was away, or "
                    "the claim has ended",
                )
            yield adopted

    def report_orphaned(self, sandbox_id: volumes.SandboxId, problem: errors.CrustError) -> None:
        """Write into each claim.json of the sandbox that its shim has ended. Raises `KeeperGone`."""
        with self._connected(sandbox_id) as keeper:
            for volume in self.store.scan():
                if volume.record is None or volume.digest not in keeper.counts:
                    continue
                (claim,) = self._adopt(sandbox_id, [volume.record], keeper)
                with contextlib.closing(claim):
                    claim.report_error(problem.shown())

    def withdraw(self, sandbox_id: str, needless: Callable[[User], bool]) -> None:
        """Put the placeholder back where these alone needed an entry. Succeeds without a real entry or a keeper."""
        gone = contextlib.suppress(keepers.KeeperGone)
        with gone, self._connected(sandbox_id) as keeper, keeper.together():
            for file, put in keeper.put_files.items():
                for user in filter(needless, put.users):
                    keeper.withdraw(file, user)

    def needing(self, sandbox_id: str) -> set[tuple[str, User]]:
        """The volumes of the sandbox, by their digests, with the containers that are created and not started."""
        with contextlib.suppress(keepers.KeeperGone), self._connected(sandbox_id) as keeper:
            puts = keeper.put_files.values()
            return {(put.name, user) for put in puts for user in put.users}
        return set()

    def recover(self, sandbox: Sandbox) -> None:
        """Claim the sandbox's volumes again, if its keeper was killed with its standby; else do nothing.

        The containers that needed a real entry were known to the keeper alone: Kata refuses those that are created
        and not started, and the engine makes them again. Raises as `kept_vm.KeptVm.recover`.
        """
        self.hide_unclaimed()
        published = [(entry.record, entry.claim) for entry in self.store.scan() if entry.record]
        used = self._used(sandbox, published)
        for handler in {record.handler for record in used}:
            vm = kept_vm.KeptVm(
                self.store.root, handler, sandbox.id, sandbox.process, self.socket(sandbox.id)
            )
            vm.recover({record.digest: record.target for record in used}).close()
        if not used:  # it may get a volume again
            keepers.start(self.socket(sandbox.id), sandbox.process).close()

    def hide_unclaimed(self) -> None:
        """Replace each real entry whose claim has ended, with both processes of its keeper, by the placeholder."""

        def records() -> list[Record]:
            published = (volume.record for volume in self.store.scan())
            return [record for record in published if record and record.image is None]

        for name, record in list(self.entries.real_ones(records)):
            gone = contextlib.suppress(claims.HeldBySandbox, claims.NotPublished)
            with gone, claims.ClaimLock.acquire(self._paths(record), record.target):
                self.entries.hide(name, record)

    def _used(
        self, sandbox: Sandbox, published: Sequence[tuple[Record, claims.Claim | None]]
    ) -> list[Record]:
        """The records of those whose claim the sandbox had, or whose device, as only one may, it has open."""
        # Kata gets no images
        blocks = [(record, claim) for record, claim in published if record.image is None]
        writers = [record.identity for record, _ in blocks if not record.readonly]
        opened = openers.opened_by(sandbox.process.pid, writers) if writers else ()
        used = []
        for record, claim in blocks:
            # an unpublish, or a claimant, looks at it
            if claim is not None and not claim.sandbox_id:
                claim = claims.read_aside(self._paths(record))
            is_named = claim is not None and claim.sandbox_id == sandbox.id
            if is_named or record.identity in opened:
                used.append(record)
        return used

    def _claimed(self, sandbox: Sandbox, records: Mapping[str, Record]) -> dict[str, Record]:
        """The records of those claims that the sandbox's keeper holds, by their digests."""
        with self._held(sandbox, records) as adopted:
            return {claim.record.digest: claim.record for claim in adopted}

    @contextlib.contextmanager
    def _held(self, sandbox: Sandbox, records: Mapping[str, Record]) -> Iterator[list[Claim]]:
        """Those claims that the sandbox's keeper holds, adopted while the block runs."""
        adopted = list[Claim]()
        with contextlib.suppress(keepers.KeeperGone), self._connected(sandbox.id) as keeper:
            held = keeper.counts if keeper.vm_pid == sandbox.process.pid else {}
            adopted = self._adopt(sandbox.id, [records[d] for d in records if d in held], keeper)
        with contextlib.ExitStack() as stack:
            for claim in adopted:
                stack.callback(claim.close)
            yield adopted

    def _adopt(
        self, sandbox_id: volumes.SandboxId, records: Sequence[Record], keeper: keepers.Keeper
    ) -> list[Claim]:
        if not records:
            return []
        targets, handler = [record.target for record in records], records[0].handler
        return adopt_volumes(self.store.root, targets, sandbox_id, handler, keeper.pid)

    def _claim(
        self,
        sandbox: Sandbox,
        records: Collection[Record],
        features: Collection[volumes.HandlerFeature],
        undo: contextlib.ExitStack,
    ) -> dict[str, Record]:
        taken = claim_volumes(
            self.store.root,
            [record.target for record in records],
            sandbox.id,
            next(record.handler for record in records),  # the pod's, so it is one
            features=features,
            process=sandbox.process,
        )
        for claim in taken:
            undo.callback(self._release, sandbox.id, claim)
        machine = json.dumps(asdict(sandbox.process)).encode("ascii")
        durable.write_file(self._machine_path(sandbox.id), machine, survives_power_cut=False)
        with keepers.start(self.socket(sandbox.id), sandbox.process) as keeper:
            with keeper.together():
                for claim in taken:
                    keeper.hold(claim.record.digest, claim.fds)
            hand_over_claims(taken, *keeper.pids)
        return {claim.record.digest: claim.record for claim in taken}

    def _release(self, sandbox_id: volumes.SandboxId, claim: Claim) -> None:
        """Undo a claim that no container of the sandbox uses. The machine lives, so this needs the claim's lock."""
        gone = contextlib.suppress(keepers.KeeperGone, ClaimLost)
        with gone, self._connected(sandbox_id) as keeper:
            if not claim.fds:
                (claim,) = self._adopt(sandbox_id, [claim.record], keeper)
            keeper.release(claim.record.digest)
        with contextlib.suppress(claims.HeldBySandbox):
            claim.release()

    def _withdraw_file(self, sandbox_id: str, file: str, user: User) -> None:
        with contextlib.suppress(keepers.KeeperGone), self._connected(sandbox_id) as keeper:
            keeper.withdraw(file, user)

    def _connected(self, sandbox_id: str) -> keepers.Keeper:
        return keepers.connect(self.socket(sandbox_id))
