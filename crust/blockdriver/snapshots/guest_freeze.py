"""Freezing filesystems in guests while their images are copied, through the proxy, by target path.

A guest thaws by itself after `limit_s`, whatever else has died, and its answer to the thaw says whether it was frozen
until then. Every guest must confirm that; otherwise the copy is not a point-in-time one and is discarded
(`ThawedEarly`).

A deferred volume without a sandbox has no writers. To keep it so the driver holds its device exclusively meanwhile,
as a sandbox would (`claim_volume`), so that a sandbox which starts now is refused. The guest is asked once more at
the end, for a runtime that opens devices without a hold.

The intent is on disk before each freeze (`freeze_intents`), and a restarted driver thaws guests at once, because a
frozen filesystem is an outage. A thaw that does not reach its guest, because the proxy or the handler restarts, is
retried until it does, or the guest has thawed by itself.
"""

import asyncio
import functools
import logging
import math
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from crust.blockdriver.snapshots.freeze_intents import Intent, Intents
from crust.core import errors, volumes
from crust.host.block import devices, holders
from crust.host.process import workers

_PAUSE_S = 0.5
"""The pause between two tries to reach the proxy."""

_log = logging.getLogger(__name__)


class ThawedEarly(errors.PeerUnavailable):
    """A guest was not frozen for the whole copy."""

    def __init__(self, volume_ids: Sequence[str], why: str) -> None:
        super().__init__(
            f"{', '.join(volume_ids)} is not copied",
            why=why,
            hint="retry; if it persists, check the runtime's log and the load of the node",
        )
        self.volume_ids = tuple(volume_ids)


@dataclass(frozen=True, slots=True)
class InGuest:
    """A writable deferred publish and its device on this host; the device is empty if it is not attached."""

    volume_id: volumes.VolumeId
    target: volumes.TargetPath
    device: str


class Guests(Protocol):
    """The guests that have volumes, by target path. A target that is not deferred is `NotFound`."""

    async def freeze(self, target: volumes.TargetPath, thaw_after_s: int) -> bool:
        """Freeze for at most `thaw_after_s`; whether a guest has the filesystem."""
        ...

    async def thaw(self, target: volumes.TargetPath) -> bool:
        """Thaw; whether the filesystem was frozen until now."""
        ...


class GuestFreezer:
    """Freezes and thaws in guests. `limit_s` (1 to 60) is the longest freeze of a guest."""

    def __init__(self, guests: Guests, intents: Intents, *, limit_s: float) -> None:
        self._guests = guests
        self._intents = intents
        self._limit_s = limit_s
        self._left: dict[volumes.VolumeId, volumes.TargetPath] = {}
        self._trying: set[volumes.VolumeId] = set()
        self._more = asyncio.Event()

    @asynccontextmanager
    async def frozen(self, members: Sequence[InGuest]) -> AsyncIterator[None]:
        """Keep all of `members` frozen while the block runs.

        Raises `ThawedEarly` afterwards if they did not: what was copied is to be thrown away. Raises
        `SandboxStarting`, and what `Guests.freeze` raises, before the block is begun.
        """
        frozen: list[InGuest] = []
        idle: list[InGuest] = []
        with ExitStack() as holds:
            try:
                for member in members:
                    frozen.append(member)  # also if the outcome is unknown
                    if not await self._freeze(member):
                        idle.append(frozen.pop())
                        await workers.run(_hold_device, member, holds)
                yield
            except BaseException:
                await self._let_go(frozen)
                raise
            await self._check_frozen(frozen, idle)

    def remember(self, left: Intent) -> None:
        """Read what a killed driver may have left frozen, for `recover`."""
        try:
            self._left[left.volume_id] = volumes.TargetPath.parse(left.target)
        except errors.InvalidRequest:
            self._intents.forget(left.volume_id)

    async def recover(self) -> None:
        """Thaw the recorded guests, or wait until they have thawed by themselves."""
        async with asyncio.TaskGroup() as group:
            self._begin_to_recover(group)

    async def keep_recovering(self) -> None:
        """`recover`, now and whenever a thaw did not reach its guest, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._more.clear()
                self._begin_to_recover(group)
                await self._more.wait()

    def _begin_to_recover(self, group: asyncio.TaskGroup) -> None:
        for volume_id in self._left.keys() - self._trying:
            self._trying.add(volume_id)
            task = group.create_task(self._recover(volume_id), name=f"thaw {volume_id}")
            task.add_done_callback(functools.partial(self._recovered, volume_id))

    def _recovered(self, volume_id: volumes.VolumeId, _: asyncio.Task[None]) -> None:
        self._trying.discard(volume_id)
        if volume_id in self._left:  # added since the last look
            self._more.set()

    async def _freeze(self, member: InGuest) -> bool:
        self._left.pop(member.volume_id, None)
        intent = Intent(member.volume_id, target=member.target.text)
        await workers.run(self._intents.note, intent)
        try:
            held = await self._guests.freeze(member.target, math.ceil(self._limit_s))
        except errors.NotFound:
            held = False  # never published, or unpublished since
        if not held:
            await workers.run(self._intents.forget, member.volume_id)
        return held

    async def _check_frozen(self, frozen: Sequence[InGuest], idle: Sequence[InGuest]) -> None:
        moved = [each.volume_id for each in frozen if not await self._thaw(each)]
        begun = [each.volume_id for each in idle if await self._woke(each)]
        if moved:
            raise ThawedEarly(moved, "its guest thawed before the copy ended")
        if begun:
            raise ThawedEarly(begun, "a sandbox began to use it during the copy")

    async def _let_go(self, frozen: Sequence[InGuest]) -> None:
        for each in frozen:
            await self._thaw(each)

    async def _thaw(self, member: InGuest) -> bool:
        """Whether the guest confirms that it was frozen; not if it cannot be reached."""
        try:
            held = await self._guests.thaw(member.target)
        except errors.CrustError as err:
            _log.error(
                "a guest cannot be thawed", extra={"volume_id": member.volume_id, "error": err}
            )
            if isinstance(err, errors.PeerUnavailable):
                self._left[member.volume_id] = member.target
                self._more.set()
                return False
            held = False
        await workers.run(self._intents.forget, member.volume_id)
        return held

    async def _woke(self, member: InGuest) -> bool:
        """Whether a guest has the volume that none had before."""
        if not await self._freeze(member):
            return False
        await self._thaw(member)
        return True

    async def _recover(self, volume_id: volumes.VolumeId) -> None:
        for _ in range(math.ceil(self._limit_s / _PAUSE_S)):
            target = self._left.get(volume_id)
            if target is None:  # frozen again, by a copy that thaws it
                return
            try:
                thawed = await self._guests.thaw(target)
            except errors.PeerUnavailable:
                await asyncio.sleep(_PAUSE_S)
                continue
            except errors.CrustError as err:
                _log.warning(
                    "a guest is not thawed yet", extra={"volume_id": volume_id, "error": err}
                )
            else:
                if thawed:
                    _log.warning(
                        "thawed a guest that was left frozen", extra={"volume_id": volume_id}
                    )
            break
        if self._left.pop(volume_id, None) is not None:
            await self._forget(volume_id)

    async def _forget(self, volume_id: volumes.VolumeId) -> None:
        """Remove the intent. If that fails, the next start thaws once more, which does no harm."""
        try:
            await workers.run(self._intents.forget, volume_id)
        except errors.CrustError as err:
            _log.warning(
                "a freeze intent cannot be removed", extra={"volume_id": volume_id, "error": err}
            )


def _hold_device(member: InGuest, holds: ExitStack) -> None:
    if not member.device:
        return
    try:
        holds.callback(os.close, devices.open_exclusive(member.device))
    except holders.DeviceInUse as err:
        raise errors.OperationPending.named(
            "SandboxStarting",
            f"{member.volume_id} is not copied",
            why=f"no guest has mounted it yet, and its device is held: {err.why}",
            hint="retry when the sandbox is running",
        ) from err
