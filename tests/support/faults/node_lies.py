"""A step of a volume's life, while each call fails once by which a node's parts, in this process, ask the kernel."""

import itertools
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from crust.core import logs
from tests.support.faults import lies
from tests.support.faults.lies import Concerns, Failure
from tests.support.nodes.volume_life import LifeT, Refused, Step, refused


@dataclass(frozen=True, slots=True)
class OfNode(Concerns):
    """The files of a node, loop devices, mounts and processes, in calls that a step causes.

    Work in the background has no caller who repeats it: its own tests have its failures. Nor does a call of the test
    itself fail, in its main thread.
    """

    def has(self, path: str) -> bool:
        """See `Concerns`."""
        is_of_test = threading.current_thread() is threading.main_thread()
        if is_of_test or logs.context.get() is None:
            return False
        return path.startswith(_DEVICES) or Concerns.has(self, path)


_DEVICES = (
    "/dev/loop",
    "/sys/block/loop",
    "/sys/class/block/loop",
    "/sys/devices/virtual/block/loop",
    "/sys/dev/block/",
)
_LISTS = frozenset(
    {"/proc", "/proc/partitions", "/proc/self/mountinfo", "/proc/self/ns/mnt", "/sys/block"}
)


async def lied(
    life: LifeT, step: Step[LifeT], pid: int, *, first: int, calls: Sequence[str] = lies.CALLS
) -> AsyncIterator[tuple[Failure, Refused | None]]:
    """Take the step with each failure of `calls`; after each the caller has it repeated.

    `pid` is a process that it concerns. The errnos begin with the `first`, so that the steps get all of them.
    """
    errnos = lies.all_errnos if lies.ALL else lies.in_turn(first)
    logs.context.set({})  # for a step that is no RPC
    concerns = OfNode(_LISTS, (life.node.places.root, f"/proc/{pid}"))
    for number in itertools.count():
        for each in errnos(number):
            failure = Failure(number, each)
            with lies.failing(concerns, failure, calls=calls):
                refusal = await refused(step, life)
            if not failure.call:
                return
            yield failure, refusal
