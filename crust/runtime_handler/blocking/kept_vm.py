"""Recovers the claims of a VM that lives after its keeper and standby have both ended (H-46).

    vm = KeptVm(root, handler, sandbox_id, process, socket)
    keeper = vm.recover({name: target, ...})      every volume whose device the VM has, by the keeper's names for them

The locks are free. While the VM's process lives, claim.json refuses every claimant that asks (H-23), so `recover`
claims the volumes for it again and starts another keeper. It kills the VM only if another sandbox has the lock of a
volume, or claim.json names another one: a runtime that does not ask has given the volume to a second kernel, and the
filesystem of a killed VM replays its journal. Everything else is no answer and kills nobody: what can be claimed is
claimed, and the caller tries again. A runtime calls it

- when its connection to the keeper breaks (`Keeper.fileno`): if a standby has succeeded, `recover` connects to it;
- when it has adopted a VM at its own start: a daemon may have been killed half way through `recover`;
- again after any error but `errors.NotFound` and `VmKilled`.

Functions block, for milliseconds if nothing is wrong.
"""

import contextlib
import select
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from crust.core import errors, volumes
from crust.handoff import claims
from crust.host.process import processes
from crust.host.process.processes import Process
from crust.runtime_handler.blocking import claim, keepers, take_claim

__all__ = ["ClaimInHand", "KeptVm", "VmKilled"]

_STILL_OURS_S = 2.0
_AGAIN_MS = 20


class VmKilled(errors.NotReady):
    def __init__(self, sandbox_id: str, reason: errors.CrustError) -> None:
        super().__init__(
            f"the VM of sandbox {sandbox_id} was killed",
            why=f"its crust keeper had ended, and another sandbox got a volume of it: {reason}",
        )
        self.sandbox_id = sandbox_id
        self.reason = reason


class ClaimInHand(Protocol):
    """A claim whose lock the caller still has, such as `claim.Claim`."""

    @property
    def fds(self) -> tuple[int, ...]:
        """Lock and device."""

    def hold_device(self, its_vm: int) -> None:
        """Open the device again, if this process does not have it; its virtual machine has it open."""


@dataclass(frozen=True, slots=True)
class KeptVm:
    """One VM of a sandbox: its process, its keeper's socket, and its claims in the handoff directory at `root`."""

    root: str
    handler: volumes.HandlerName
    sandbox_id: volumes.SandboxId
    process: Process
    socket: Path

    def recover(
        self,
        used: Mapping[str, volumes.TargetPath | None],
        in_hand: Mapping[str, ClaimInHand] | None = None,
    ) -> keepers.Keeper:
        """A keeper that holds the claims of all volumes that the VM uses: the running keeper, or a new one.

        None in `used` is a volume without an entry. `in_hand` are claims whose descriptors the caller still has, and
        keeps open meanwhile. Raises VmKilled after it has killed the VM; `errors.NotFound` if the VM had ended; the
        error of the first volume that could not be claimed, `NotSeen`, and the errors of `keepers`: then the VM runs,
        a keeper holds what was claimed, and the caller tries again.
        """
        with processes.holding(self.process) as vm, contextlib.ExitStack() as copies:
            if vm is None:
                raise self._ended()
            try:
                return self._recover(used, in_hand or {}, copies)
            except _TakenByAnother as err:
                if processes.is_over(vm):
                    raise self._ended() from err.reason
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(vm, signal.SIGKILL)
                select.select([vm], [], [])  # without a limit: until it has ended it may write
                raise VmKilled(self.sandbox_id, err.reason) from err.reason
            except errors.CrustError as err:
                if processes.is_over(vm):
                    raise self._ended() from err
                raise

    def _ended(self) -> errors.NotFound:
        return errors.NotFound(f"the VM of sandbox {self.sandbox_id} has ended")

    def _recover(
        self,
        used: Mapping[str, volumes.TargetPath | None],
        in_hand: Mapping[str, ClaimInHand],
        copies: contextlib.ExitStack,
    ) -> keepers.Keeper:
        keeper: keepers.Keeper | None = None
        with contextlib.suppress(keepers.KeeperGone):
            keeper = keepers.connect(self.socket)
        try:
            held_names = keeper.counts if keeper is not None else {}
            missing = {name: used[name] for name in used if name not in held_names}
            fds, failed = self._all_claimed(missing, in_hand, copies)  # before the keeper
            if keeper is None and (fds or not failed):
                keeper = keepers.start(self.socket, self.process)
            for name, descriptors in fds.items():
                assert keeper is not None
                try:
                    keeper.hold(name, descriptors)
                except keepers.KeeperGone:  # its standby succeeds it
                    keeper.close()
                    keeper = keepers.connect(self.socket)
                    keeper.hold(name, descriptors)
            if failed or keeper is None:
                raise failed[0]
        except BaseException:
            if keeper is not None:
                keeper.close()
            raise
        return keeper

    def _all_claimed(
        self,
        missing: Mapping[str, volumes.TargetPath | None],
        in_hand: Mapping[str, ClaimInHand],
        copies: contextlib.ExitStack,
    ) -> tuple[dict[str, Sequence[int]], list[errors.CrustError]]:
        """The descriptors of each claim, and the errors of the others. Raises `_TakenByAnother`."""
        fds: dict[str, Sequence[int]] = {}
        failed: list[errors.CrustError] = []
        for name, target in missing.items():
            try:
                if name in in_hand:
                    in_hand[name].hold_device(self.process.pid)
                    fds[name] = in_hand[name].fds
                elif target is None:
                    raise errors.NotFound.named(
                        "EntryUnknown",
                        f"the volume {name} cannot be claimed again",
                        why="the handoff directory has no entry for it",
                    )
                else:
                    # closed after the VM was killed, or the keeper has its own
                    copy = contextlib.closing(self._reclaimed(target))
                    fds[name] = copies.enter_context(copy).fds
            except errors.CrustError as err:
                is_had = isinstance(err, claim.ClaimedSince)
                # a lock without a name is an unpublish, or a claimant that is not done
                if isinstance(err, claims.HeldBySandbox) and err.sandbox_id:
                    is_had = (err.sandbox_id, err.handler) != (self.sandbox_id, self.handler)
                if is_had:
                    raise _TakenByAnother(err) from err
                failed.append(err)
        return fds, failed

    def _reclaimed(self, target: volumes.TargetPath) -> claim.Claim:
        """Claim the volume again. A keeper that ends closes its socket a moment before the lock."""
        left_ms = _STILL_OURS_S * 1000
        while True:
            try:
                return take_claim.reclaim_volume(
                    self.root, target, self.sandbox_id, self.handler, self.process
                )
            except claims.HeldBySandbox as err:
                if err.sandbox_id not in (self.sandbox_id, "") or left_ms <= 0:
                    raise
            left_ms -= _AGAIN_MS
            select.select([], [], [], _AGAIN_MS / 1000)


class _TakenByAnother(Exception):
    def __init__(self, reason: errors.CrustError) -> None:
        super().__init__(str(reason))
        self.reason = reason
