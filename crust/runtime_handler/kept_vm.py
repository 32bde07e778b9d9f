"""Recovers the claims of a VM that lives after its keeper and standby have both ended (H-46).

    vm = KeptVm(root, handler, sandbox_id, pid, socket)
    keeper = vm.recover({name: target, ...})      every volume whose device the VM has, by the keeper's names for them

The claims were free: another sandbox may have taken a volume, and given it back. `recover` claims the free volumes
and starts another keeper. In doubt it kills the VM: a second kernel that writes to a filesystem destroys it, and the
filesystem of a killed VM replays its journal. A runtime calls it

- when its connection to the keeper breaks (`Keeper.fileno`): if a standby has succeeded, `recover` connects to it;
- when it has adopted a VM at its own start: a daemon may have been killed half way through `recover`.

Functions block, for milliseconds if nothing is wrong.
"""

import contextlib
import os
import select
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from crust.core import errors, volumes
from crust.handoff import claims
from crust.host.process import syscalls
from crust.runtime_handler import claim, keepers, take_claim

__all__ = ["ClaimInHand", "KeptVm", "VmKilled"]

_STILL_OURS_S = 2.0
_AGAIN_MS = 20


class VmKilled(errors.NotReady):
    """The VM was killed: it had a volume whose claim had ended and could not be taken again."""

    def __init__(self, sandbox_id: str, reason: errors.CrustError) -> None:
        super().__init__(
            f"the VM of sandbox {sandbox_id} was killed",
            why=f"its keeper had ended, and a claim could not be taken again: {reason}",
            hint="start the pod again; find out what killed keeper and standby",
        )
        self.sandbox_id = sandbox_id
        self.reason = reason


class ClaimInHand(Protocol):
    """A claim whose lock the caller still has, such as `claim.Claim`."""

    @property
    def fds(self) -> tuple[int, ...]:
        """Lock and device."""

    def hold_device(self) -> None:
        """Open the device again, if this process does not have it."""


@dataclass(frozen=True, slots=True)
class KeptVm:
    """One VM of a sandbox: process `pid`, its keeper's socket, and its claims in the handoff directory at `root`."""

    root: str
    handler: volumes.HandlerName
    sandbox_id: volumes.SandboxId
    pid: int
    socket: Path

    def recover(
        self,
        used: Mapping[str, volumes.TargetPath | None],
        in_hand: Mapping[str, ClaimInHand] | None = None,
    ) -> keepers.Keeper:
        """A keeper that holds the claims of all volumes that the VM uses: the running keeper, or a new one.

        None in `used` is a volume without an entry. `in_hand` are claims whose descriptors the caller still has, and
        keeps open meanwhile. Raises VmKilled after it has killed the VM; `errors.NotFound` if the VM had ended;
        KeeperNotResponding, which changes no claim.
        """
        with syscalls.translating(f"cannot recover the claims of process {self.pid}"):
            vm = os.pidfd_open(self.pid)
        new_claims: list[claim.Claim] = []
        try:
            return self._recover(used, in_hand or {}, new_claims)
        except keepers.KeeperNotResponding:
            raise
        except errors.CrustError as err:
            if _has_ended(vm):
                raise errors.NotFound(f"the VM of sandbox {self.sandbox_id} has ended") from err
            _kill(vm)
            raise VmKilled(self.sandbox_id, err) from err
        finally:
            for new_claim in new_claims:  # not before the VM has ended, or the keeper has them
                new_claim.hand_over()
            os.close(vm)

    def _recover(
        self,
        used: Mapping[str, volumes.TargetPath | None],
        in_hand: Mapping[str, ClaimInHand],
        new_claims: list[claim.Claim],
    ) -> keepers.Keeper:
        keeper, held_names = self._keeper()
        try:
            missing = [name for name in used if name not in held_names]
            fds: dict[str, Sequence[int]] = {}
            for name in missing:  # all locks before the keeper: others may wait for them
                fds[name] = self._claimed(name, used[name], in_hand, new_claims).fds
            if keeper is None:
                keeper = keepers.start(self.socket, self.pid)
            for name in missing:
                keeper = self._hold(keeper, name, fds[name])
        except BaseException:
            if keeper is not None:
                keeper.close()
            raise
        return keeper

    def _keeper(self) -> tuple[keepers.Keeper | None, Mapping[str, int]]:
        """The running keeper and its claims, if there is one. The standby of a keeper that ends holds the same."""
        while True:
            try:
                keeper = keepers.connect(self.socket)
            except keepers.KeeperGone:
                return None, {}
            try:
                return keeper, keeper.held()
            except keepers.KeeperGone:
                keeper.close()
            except BaseException:
                keeper.close()
                raise

    def _hold(self, keeper: keepers.Keeper, name: str, fds: Sequence[int]) -> keepers.Keeper:
        """Give the claim to the keeper, or to its standby if the keeper ends; returns the process that has it."""
        try:
            keeper.hold(name, fds)
        except keepers.KeeperGone:
            keeper.close()
            keeper = keepers.connect(self.socket)
            keeper.hold(name, fds)
        return keeper

    def _claimed(
        self,
        name: str,
        target: volumes.TargetPath | None,
        in_hand: Mapping[str, ClaimInHand],
        new_claims: list[claim.Claim],
    ) -> ClaimInHand:
        if name in in_hand:
            in_hand[name].hold_device()
            return in_hand[name]
        if target is None:
            raise errors.NotFound.named(
                "EntryUnknown",
                f"the volume {name} cannot be claimed again",
                why="the handoff directory has no entry for it",
                hint="find out who removed the entry of a volume that was in use",
            )
        new_claims.append(self._reclaimed(target))
        return new_claims[-1]

    def _reclaimed(self, target: volumes.TargetPath) -> claim.Claim:
        """Claim the volume again. A keeper that ends closes its socket a moment before the lock."""
        for _ in range(int(_STILL_OURS_S * 1000 / _AGAIN_MS)):
            try:
                return self._reclaim(target)
            except claims.HeldBySandbox as err:
                if err.sandbox_id != self.sandbox_id:
                    raise
            select.select([], [], [], _AGAIN_MS / 1000)
        return self._reclaim(target)

    def _reclaim(self, target: volumes.TargetPath) -> claim.Claim:
        return take_claim.reclaim_volume(
            self.root, target, self.sandbox_id, self.handler, pid=self.pid
        )


def _has_ended(vm: int) -> bool:
    return bool(select.select([vm], [], [], 0)[0])


def _kill(vm: int) -> None:
    """Kill the VM and wait until it has ended, without a limit: until then it may write."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(vm, signal.SIGKILL)
    select.select([vm], [], [])
