"""Freezes filesystems while their images are copied, in guests and on this host, for a limited time.

The steps are the same for both: the intent is on disk before each freeze (`host_freeze`), all are frozen before the
first copy, all are thawed, and the intent goes with the thaw. A stopped database is an outage, so no filesystem stays
frozen for longer than the limit; and the copy counts only if every filesystem was frozen until its thaw.

*In a guest*, which the proxy finds by target path. A guest thaws by itself after the limit, even if all other
processes have died, and its answer to the thaw says whether it was frozen until then (`ThawedEarly`). If a thaw does
not reach its guest, because the proxy or the handler restarts, the driver retries until the guest has thawed.

A deferred volume without a sandbox has no writers. Until the copy ends, the driver holds its device exclusively, as a
sandbox would (`claim_volume`), so that a sandbox which starts now is refused. At the end the driver asks the guest
once more, because a runtime may open devices without a hold.

*On this host* the kernel's answer to the thaw says whether another program has thawed before (`host_freeze`).

A freeze outlives the process that made it, so a restarted driver thaws at once, on this host before everything else.
A thaw on this host that fails is repeated while the driver runs, and before the next freeze: the kernel does not say
who has frozen a filesystem, and the intent does.

A point-in-time copy of a volume needs this (`plan`):

    not in use                    nothing
    mounted on this host          its filesystem is frozen
    mounted by a guest            its filesystem is frozen, by the guest
    a raw device, published       its writers cannot be stopped: the copy must be atomic

With a freeze all written data is in the copy. Without a freeze an atomic copy is crash-consistent, like after a power
cut: the user of a raw device must cope with that. No kernel interface makes the writers of a loop device wait: its
queue is quiesced only within an ioctl, a read-only device fails writes instead of delaying them, and a freeze of the
pool's own filesystem would block the copy as well. So the driver refuses a raw device in use if copies take time; in
a group it checks the device for writes (`snapshot_sets`).
"""

import asyncio
import functools
import itertools
import logging
import math
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from typing import TypeAlias

from crust.blockdriver.engines.pool_access import NodeAccess
from crust.blockdriver.guests import Guests
from crust.blockdriver.host import device_mounts
from crust.blockdriver.records.stores import Stores
from crust.blockdriver.snapshots import host_freeze
from crust.blockdriver.snapshots.host_freeze import HostFreezes, Intent, OnHost, ThawedEarly
from crust.core import errors, volumes
from crust.host.block import devices, holders, users
from crust.host.process import workers

LIMIT_S = 60.0
_PAUSE_S = 0.5
"""The pause between two tries to reach the proxy."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InGuest:
    """A writable deferred publish and its device on this host; the device is empty if it is not attached."""

    volume_id: volumes.VolumeId
    target: volumes.TargetPath
    device: str


Member: TypeAlias = InGuest | OnHost
"""A filesystem that is frozen."""


@dataclass(frozen=True, slots=True)
class QuiescePlan:
    """The writers of some volumes: filesystems to freeze, in guests first, and raw devices to check for writes."""

    members: tuple[Member, ...] = ()
    raw: tuple[volumes.VolumeId, ...] = ()


def plan(stores: Stores, volume_ids: Iterable[volumes.VolumeId]) -> QuiescePlan:
    """The plan for a point-in-time copy of all the volumes.

    Raises `RawDeviceInUse`, `FilesystemMountCovered`, `BusyAfterLazyUnmount`. Valid while the caller has the volumes
    locked. Blocks.
    """
    plans = [_plan_of(stores, volume_id) for volume_id in volume_ids]
    members = [member for part in plans for member in part.members]
    return QuiescePlan(
        members=tuple(sorted(members, key=lambda member: isinstance(member, OnHost))),
        raw=tuple(volume_id for part in plans for volume_id in part.raw),
    )


def _plan_of(stores: Stores, volume_id: volumes.VolumeId) -> QuiescePlan:
    live = stores.node_state.live_publishes(volume_id)
    writers = [publish for publish in live if not publish.readonly]
    attachment = stores.access.attached(volume_id)
    device = attachment.device if attachment else None
    deferred = next((writer for writer in writers if writer.deferred), None)
    if deferred is not None:
        target = volumes.TargetPath(deferred.target)
        return QuiescePlan(members=(InGuest(volume_id, target, device.path if device else ""),))
    # a publish that the node state has lost is still a bind of the device
    raw = {writer.target for writer in writers if writer.kind == "block"}
    binds = device_mounts.node_mounts(device) if device else ()
    raw |= {bind.target for bind in binds if bind.writes_here}
    if raw and not stores.provisioning.copies_at_once():
        raise errors.NotReady.named(
            "RawDeviceInUse",
            f"{volume_id} cannot be copied now",
            why=f"it is published as a raw device at {min(raw)}, and a copy that takes time would be inconsistent",
        )
    if raw:
        return QuiescePlan(raw=(volume_id,))
    all_mounts = device_mounts.filesystem_mounts(device) if device else ()
    mounts = [mount for mount in all_mounts if mount.filesystem_writes]
    # a freeze of a covered mount point would freeze the mount that covers it
    visible = next(filter(device_mounts.is_visible, mounts), None)
    if mounts and visible is None:
        raise errors.NotReady.named(
            "FilesystemMountCovered",
            f"{volume_id} cannot be copied now",
            why="each of its mounts is covered by another mount",
        )
    if device is not None and not mounts and not live and users.is_held(device):
        raise errors.NotReady.named(
            "BusyAfterLazyUnmount",
            f"{volume_id} cannot be copied now",
            why=f"it is not published, but {device.path} is busy: a program has it open, or it was unmounted lazily",
        )
    if device is None or visible is None:
        return QuiescePlan()
    return QuiescePlan(members=(OnHost(volume_id, device.identity, visible.target),))


@dataclass(eq=False)
class Freezer:
    """Freezes and thaws. `limit_s` (1 to 60) is the longest freeze."""

    _intents: host_freeze.Intents
    _access: NodeAccess
    _guests: Guests
    limit_s: float = LIMIT_S
    _left: dict[volumes.VolumeId, Intent] = field(default_factory=dict, init=False)
    """The intents whose thaw has to be repeated."""
    _trying: set[volumes.VolumeId] = field(default_factory=set, init=False)
    _more: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    @asynccontextmanager
    async def frozen(self, members: Sequence[Member]) -> AsyncIterator[None]:
        """Keep all of `members` frozen while the block runs.

        Raises `ThawedEarly` or FrozenTooLong afterwards if they were not: then the copy is invalid. Before the block
        begins it raises NoRuntimeSocket, `SandboxStarting`, AlreadyFrozen and the errors of `Guests.freeze`; before
        and after it StillFrozen.
        """
        if any(isinstance(member, InGuest) for member in members):
            self._guests.check_reachable()  # before a guest counts as frozen, and has to be thawed
        frozen: list[Member] = []
        idle: list[InGuest] = []
        with ExitStack() as holds:
            freezes = holds.enter_context(closing(HostFreezes(self.limit_s)))
            try:
                for member in members:
                    await workers.run(
                        host_freeze.settle, self._intents, member.volume_id, self._access
                    )
                    frozen.append(member)  # also if the outcome is unknown
                    if not await self._freeze(member, freezes):
                        frozen.pop()
                        assert isinstance(member, InGuest)
                        idle.append(member)
                        await workers.run(_hold_device, member, holds)
                yield
            except BaseException:
                for to_thaw in frozen:
                    await self._thaw(to_thaw, freezes)
                raise
            problems = [await self._thaw(member, freezes) for member in frozen]
            problems += [await self._woken(guest, freezes) for guest in idle]
        for problem in problems:
            if problem is not None:
                raise problem

    async def _freeze(self, member: Member, freezes: HostFreezes) -> bool:
        """Freeze the filesystem; returns False if no guest has it."""
        self._left.pop(member.volume_id, None)
        await workers.run(self._intents.note, _intent(member))
        if isinstance(member, OnHost):
            await workers.run(freezes.freeze, member)
            return True
        try:
            is_frozen = await self._guests.freeze(member.target, math.ceil(self.limit_s))
        except errors.NotFound:
            is_frozen = False  # never published, or unpublished since
        if not is_frozen:
            await self._forget(member)
        return is_frozen

    async def _thaw(self, member: Member, freezes: HostFreezes) -> errors.CrustError | None:
        """Thaw the filesystem; returns the error if its copy is invalid. Raises nothing: others follow.

        If a thaw fails on this host, or does not reach its guest, `keep_recovering` repeats it.
        """
        extra: dict[str, object] = {"volume_id": member.volume_id}
        problem: errors.CrustError | None
        if isinstance(member, OnHost):
            try:
                problem = await workers.run(freezes.thaw, member)
            except errors.CrustError as err:
                _log.error("a filesystem stays frozen", extra={**extra, "error": err})
                self._leave(member)
                problem = err
        else:
            problem = ThawedEarly(member.volume_id, "its guest thawed before the copy ended")
            try:
                if await self._guests.thaw(member.target):
                    problem = None
            except errors.CrustError as err:
                _log.error("a guest cannot be thawed", extra={**extra, "error": err})
                if isinstance(err, errors.PeerUnavailable):
                    self._leave(member)
        if member.volume_id not in self._left:
            await self._forget(member)
        return problem

    async def _forget(self, member: Member) -> None:
        """Remove the intent. If that fails, `keep_recovering` thaws once more, without harm, and removes it."""
        try:
            await workers.run(self._intents.forget, member.volume_id)
        except errors.CrustError as err:
            extra = {"volume_id": member.volume_id, "error": err}
            _log.warning("a freeze intent cannot be removed", extra=extra)
            self._leave(member)

    def _leave(self, member: Member) -> None:
        self._left[member.volume_id] = _intent(member)
        self._more.set()

    async def _woken(self, member: InGuest, freezes: HostFreezes) -> errors.CrustError | None:
        """The error if a guest has the volume now and had not before: its copy is invalid."""
        problem: errors.CrustError
        problem = ThawedEarly(member.volume_id, "a sandbox began to use it during the copy")
        try:
            if not await self._freeze(member, freezes):
                return None
        except errors.CrustError as err:  # the outcome is unknown
            problem = err
        await self._thaw(member, freezes)
        return problem

    def open(self, *, is_mounted: bool = False) -> None:
        """Thaw filesystems of this host that a killed driver left frozen.

        At first those that are mounted (`is_mounted`), before a later step of the start can fail. Then those that
        only the open engine finds; and note the rest: guests, and what failed.
        """
        for intent in self._intents.open():
            if not is_mounted:
                self._left[intent.volume_id] = intent
            if intent.target:
                continue
            try:
                if host_freeze.thaw(intent, None if is_mounted else self._access):
                    self._intents.forget(intent.volume_id)
                    self._left.pop(intent.volume_id, None)
            except errors.CrustError as err:
                extra = {"volume_id": intent.volume_id, "error": err}
                _log.error("a filesystem stays frozen", extra=extra)

    async def keep_recovering(self) -> None:
        """Thaw what is left, now and whenever a thaw failed or did not reach its guest, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._more.clear()
                for volume_id in self._left.keys() - self._trying:
                    self._trying.add(volume_id)
                    task = group.create_task(self._recover(volume_id), name=f"thaw {volume_id}")
                    task.add_done_callback(functools.partial(self._recovered, volume_id))
                await self._more.wait()

    def _recovered(self, volume_id: volumes.VolumeId, _: asyncio.Task[None]) -> None:
        self._trying.discard(volume_id)
        if volume_id in self._left:  # added since the last look
            self._more.set()

    async def _recover(self, volume_id: volumes.VolumeId) -> None:
        extra: dict[str, object] = {"volume_id": volume_id}
        for number in itertools.count(1):
            intent = self._left.get(volume_id)
            if intent is None:  # frozen again, by a copy that thaws it
                return
            try:
                if not intent.target:
                    await workers.run(host_freeze.thaw, intent, self._access)
                elif await self._guests.thaw(volumes.TargetPath.parse(intent.target)):
                    _log.warning("thawed a guest that was left frozen", extra=extra)
                break
            except errors.PeerUnavailable:
                # a guest has thawed by itself then, a filesystem of this host never does
                if intent.target and number * _PAUSE_S >= self.limit_s:
                    break
                await asyncio.sleep(_PAUSE_S)
            except errors.CrustError as err:
                _log.warning("a guest is not thawed yet", extra={**extra, "error": err})
                break
        if self._left.pop(volume_id, None) is not None:
            try:
                await workers.run(self._intents.forget, volume_id)
            except errors.CrustError as err:  # the next start thaws once more, without harm
                _log.warning("a freeze intent cannot be removed", extra={**extra, "error": err})


def _intent(member: Member) -> Intent:
    if isinstance(member, OnHost):
        return Intent(member.volume_id, identity=str(member.identity))
    return Intent(member.volume_id, target=member.target.text)


def _hold_device(member: InGuest, holds: ExitStack) -> None:
    if not member.device:
        return
    try:
        holds.callback(os.close, devices.open_exclusive(member.device))
        # a virtual machine that lost its runtime has the device open plainly, beside this hold
        users.check(devices.source(member.device), users.Purpose.GUEST_WRITES, is_mine=True)
    except holders.DeviceInUse as err:
        raise errors.OperationPending.named(
            "SandboxStarting",
            f"{member.volume_id} is not copied",
            why=f"no guest has mounted it yet, and its device is held: {err.why}",
        ) from err
