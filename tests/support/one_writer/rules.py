"""The decisions by which one device has one writer, each as a function of answers; `node` carries them out.

A decision returns, or raises the refusal. It gets what the host answers, as `crust.host.answers` has it, and so
no answer is a refusal. Where crust decides the same in a function, that function is the rule: `Rules` names it.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from crust.core import errors, volumes
from crust.host.answers import Answer, NotSeen, Present, seen
from crust.proxy import target, unpublish
from crust.proxy.target import PublishPlan, TargetRow, TargetState, UnpublishPlan, Wanted


class Purpose(Enum):
    """The use for which a device is wanted: it decides which users are in the way."""

    GUEST = "a guest writes: no writer, no mount, no exclusive hold, no bind"
    HOST = "the host writes: no writer, no exclusive hold"
    GIVE_BACK = "the driver gets it back: no writer"


class Host(Protocol):
    """The host, asked about one device while its claim lock is taken. True: somebody is in the way."""

    def process(self) -> Answer[bool] | None:
        """Whether the process of claim.json runs; None if claim.json is lost or names none."""

    def users(self, purpose: Purpose) -> Answer[bool]:
        """Whether the device has a user who is in the way."""

    def in_flight(self) -> Answer[bool]:
        """Whether writes of an ended process are in flight to it."""


Decision = Callable[[Host], None]


def refuse_if(answer: Answer[bool]) -> None:
    """Raise if somebody is in the way, or it is not seen."""
    if seen(answer):
        raise errors.NotReady("the device is in use")


DEVICE = volumes.BlockSource("/dev/loop1", volumes.DeviceIdentity(7, 1, 1))
"""The device, for decisions of crust that name one."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """The host, as the proxy asks it."""

    host: Host

    def check_given_back(self, _source: volumes.BlockSource) -> None:
        refuse_if(self.host.users(Purpose.GIVE_BACK))

    def check_writes_ended(self, _source: volumes.BlockSource) -> None:
        refuse_if(self.host.in_flight())


def give_back(host: Host) -> None:
    """An unpublish, or another device for the same volume: the driver may detach this one.

    The process of claim.json is asked first. All open files of the node are searched only if there is none to ask.
    Writes outlive their process, so they are asked in both cases.
    """
    process = host.process()
    if process is not None:
        refuse_if(process)
    unpublish.check_given_back(_Asked(host), DEVICE, has_ended=process is not None)


def first_publish(host: Host) -> None:
    """A deferred publish of a device that the volume did not have before."""
    refuse_if(host.users(Purpose.GUEST))


def claim(host: Host) -> None:
    """A sandbox's claim. A VM that will open the device is seen by its process alone."""
    process = host.process()
    if process is not None:
        refuse_if(process)
    refuse_if(host.users(Purpose.GUEST))


def host_publish(host: Host) -> None:
    """The host mounts a device that a guest may have written, or binds the node of a device."""
    refuse_if(host.users(Purpose.HOST))


class Named(Enum):
    """The sandbox of claim.json, as a VM without a keeper finds it."""

    OWN = "its own claim"
    LATER = "a later claim of another sandbox"
    NONE = "claim.json is lost"


@dataclass(frozen=True, slots=True)
class Kept:
    """A VM whose keepers have ended, and its volume."""

    process: Answer[bool]
    """Whether the VM runs."""
    named: Named
    another: Answer[bool]
    """Whether another holder has the volume: its claim lock, the device, or a mount."""


class Recovery(Enum):
    """What becomes of a VM whose keepers have ended (H-46)."""

    CLAIM = "claim the volume again"
    ENDED = "its VM has ended"
    KILL = "kill the VM"
    WAIT = "try again later"


def recover(kept: Kept) -> Recovery:
    """Kill only if another holder is seen, or if another sandbox has claimed since: the VM's cache is stale then."""
    try:
        if not seen(kept.process):
            return Recovery.ENDED
        if kept.named is Named.LATER:
            return Recovery.KILL
        is_held = seen(kept.another)
    except NotSeen:
        return Recovery.WAIT
    if is_held:
        return Recovery.KILL
    return Recovery.CLAIM if kept.named is Named.OWN else Recovery.WAIT


@dataclass(frozen=True)
class Rules:
    """All rules. A test leaves one out by another function, or by False."""

    publish_plan: Callable[[TargetState, Wanted], PublishPlan] = target.publish_plan
    unpublish_plan: Callable[[TargetState, volumes.VolumeKey], UnpublishPlan] = (
        target.unpublish_plan
    )
    conflict: Callable[[TargetRow, Collection[TargetRow]], errors.CrustError | None] = (
        target.conflict
    )
    give_back: Decision = give_back
    first_publish: Decision = first_publish
    claim: Decision = claim
    host_publish: Decision = host_publish
    recover: Callable[[Kept], Recovery] = recover
    refuses_unseen: bool = True
    """A question without an answer is `Unseen`, and no "no"."""
    keeps_claim: bool = True
    """claim.json goes when the questions are answered, and not when the lock is taken."""
    process_has_start: bool = True
    """A process is its pid and its start."""
    machine_by_claim: bool = True
    """The VM of a sandbox is the process of claim.json, and not a pid that somebody remembers."""
    renewal_is_first: bool = True
    """Another device than before: the old one is given back, and the new one is published as the first."""
    binds_by_kernel: bool = True
    """Raw binds count among the users; no table knows those of before a restart."""
    users_count_in_flight: bool = True
    """Writes of a process that has ended count among the users."""


def no_if_unseen(answer: Answer[bool]) -> Answer[bool]:
    """The answer as code takes it that makes "no" of every errno."""
    return answer if isinstance(answer, Present) else Present(value=False)
