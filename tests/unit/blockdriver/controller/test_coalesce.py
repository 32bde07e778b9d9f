"""Requests of one window are applied together; a contradicting one is aborted."""

import asyncio
from dataclasses import dataclass, field

import pytest

from crust import errors, operations, volumes
from crust.blockdriver.controller import coalesce
from crust.blockdriver.controller.coalesce import Coalescer
from crust.blockdriver.controller.modify_volume import Change, Expansion, Outcome

DRIVER = volumes.DriverName("block.csi.crust.dev")
VOLUME = volumes.VolumeId("vol-1")
OTHER = volumes.VolumeId("vol-2")
LONG_S = 600.0
"""A window that nothing but the end of the process closes."""


def limits(**values: int) -> Change:
    return Change(limits=tuple(sorted(values.items())))


def size(size_bytes: int) -> Change:
    return Change(expansion=Expansion(volumes.CapacityRange(size_bytes)))


@dataclass
class Applications:
    """What was applied. With a `gate` each application waits for it."""

    made: list[tuple[str, Change]] = field(default_factory=list)
    begun: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    gate: asyncio.Event | None = None
    error: errors.CrustError | None = None

    async def apply(self, volume_id: volumes.VolumeId, change: Change) -> Outcome:
        self.made.append((volume_id, change))
        self.begun.release()
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return Outcome()


@pytest.fixture
def applications() -> Applications:
    return Applications()


@pytest.fixture
def running() -> operations.KeyedOperations:
    return operations.KeyedOperations()


def coalescer(
    applications: Applications, running: operations.KeyedOperations, window_s: float = 0
) -> Coalescer:
    return Coalescer(DRIVER, running, applications.apply, window_s=window_s)


async def asked(gathering: Coalescer, *changes: Change) -> list[asyncio.Task[Outcome]]:
    """Requests that came in this order and wait."""
    tasks = [asyncio.create_task(gathering.ask(VOLUME, each)) for each in changes]
    await asyncio.sleep(0)
    return tasks


async def test_coalescer_applies_requests_of_one_window_once(
    applications: Applications, running: operations.KeyedOperations
) -> None:
    gathering = coalescer(applications, running, LONG_S)
    tasks = await asked(
        gathering, limits(read_iops=10), limits(write_iops=20, read_iops=10), size(7)
    )
    await gathering.drain()
    assert [await each for each in tasks] == [Outcome()] * 3
    combined = Change((("read_iops", 10), ("write_iops", 20)), Expansion(volumes.CapacityRange(7)))
    assert applications.made == [(VOLUME, combined)]


async def test_coalescer_window_admits_later_requests(
    applications: Applications, running: operations.KeyedOperations
) -> None:
    gathering = coalescer(applications, running, LONG_S)
    tasks = await asked(gathering, limits(read_iops=10))
    for _ in range(100):  # as often as there is anything to run
        await asyncio.sleep(0)
    assert not applications.made
    tasks += await asked(gathering, size(7))
    await gathering.drain()
    await asyncio.gather(*tasks)
    assert len(applications.made) == 1


async def test_coalescer_window_closes_after_its_time(
    applications: Applications, running: operations.KeyedOperations
) -> None:
    gathering = coalescer(applications, running, 0.01)
    await asyncio.gather(
        gathering.ask(VOLUME, limits(read_iops=10)), gathering.ask(VOLUME, size(7))
    )
    assert len(applications.made) == 1


@pytest.mark.parametrize(
    ("first", "added"),
    [
        (limits(read_iops=10), limits(read_iops=11)),
        (limits(read_iops=10, write_iops=20), limits(write_iops=21)),
        (size(7), size(8)),
    ],
)
async def test_coalescer_refuses_only_the_contradicting_request(
    applications: Applications,
    running: operations.KeyedOperations,
    first: Change,
    added: Change,
) -> None:
    gathering = coalescer(applications, running, LONG_S)
    tasks = await asked(gathering, first, added, limits(read_bytes_per_second=99))
    with pytest.raises(
        coalesce.ConflictingChange, match=r"has another (read_iops|write_iops|size)"
    ):
        await tasks[1]
    await gathering.drain()
    await tasks[0]
    await tasks[2]
    ((_, combined),) = applications.made
    assert ("read_bytes_per_second", 99) in (combined.limits or ())
    assert combined.expansion == first.expansion


async def test_coalescer_keeps_volumes_apart(
    applications: Applications, running: operations.KeyedOperations
) -> None:
    gathering = coalescer(applications, running)
    await asyncio.gather(
        gathering.ask(VOLUME, limits(read_iops=10)), gathering.ask(OTHER, limits(read_iops=11))
    )
    assert sorted(each for each, _ in applications.made) == [VOLUME, OTHER]


async def test_coalescer_gathers_the_next_requests_during_an_application(
    applications: Applications, running: operations.KeyedOperations
) -> None:
    applications.gate = asyncio.Event()
    gathering = coalescer(applications, running)
    first = await asked(gathering, limits(read_iops=10))
    await applications.begun.acquire()
    later = await asked(gathering, limits(read_iops=11), size(7), limits(write_iops=5))
    assert len(applications.made) == 1
    applications.gate.set()
    await asyncio.gather(*first, *later)
    second = Change((("read_iops", 11), ("write_iops", 5)), Expansion(volumes.CapacityRange(7)))
    assert [each for _, each in applications.made] == [limits(read_iops=10), second]


async def test_coalescer_identical_request_joins_the_running_application(
    applications: Applications, running: operations.KeyedOperations
) -> None:
    applications.gate = asyncio.Event()
    gathering = coalescer(applications, running)
    first = await asked(gathering, limits(read_iops=10, write_iops=20))
    await applications.begun.acquire()
    retries = await asked(gathering, limits(read_iops=10, write_iops=20), limits(write_iops=20))
    applications.gate.set()
    await asyncio.gather(*first, *retries)
    assert len(applications.made) == 1


async def test_coalescer_refuses_a_join_that_the_next_application_would_undo(
    applications: Applications, running: operations.KeyedOperations
) -> None:
    """A joined request for 10 would succeed just before the next application sets 11."""
    applications.gate = asyncio.Event()
    gathering = coalescer(applications, running)
    first = await asked(gathering, limits(read_iops=10))
    await applications.begun.acquire()
    later = await asked(gathering, limits(read_iops=11), limits(read_iops=10))
    applications.gate.set()
    with pytest.raises(coalesce.ConflictingChange):
        await later[1]
    await asyncio.gather(first[0], later[0])
    await gathering.ask(VOLUME, limits(read_iops=10))
    assert [each for _, each in applications.made][-2:] == [
        limits(read_iops=11),
        limits(read_iops=10),
    ]


async def test_coalescer_cancelled_caller_does_not_cancel_its_request(
    applications: Applications, running: operations.KeyedOperations
) -> None:
    gathering = coalescer(applications, running, LONG_S)
    tasks = await asked(gathering, limits(read_iops=10), limits(write_iops=20))
    tasks[0].cancel()
    await asyncio.wait([tasks[0]])
    await gathering.drain()
    await tasks[1]
    assert applications.made == [(VOLUME, limits(read_iops=10, write_iops=20))]


async def test_coalescer_failure_reaches_all_callers_and_the_next_request_is_applied(
    applications: Applications, running: operations.KeyedOperations
) -> None:
    applications.error = errors.NotFound("there is no such volume")
    gathering = coalescer(applications, running)
    for task in await asked(gathering, limits(read_iops=10), size(7)):
        with pytest.raises(errors.NotFound):
            await task
    applications.error = None
    assert await gathering.ask(VOLUME, limits(read_iops=10)) == Outcome()


async def test_coalescer_during_another_operation_aborts_all_requests(
    applications: Applications, running: operations.KeyedOperations
) -> None:
    gate = asyncio.Event()
    key = volumes.VolumeKey(DRIVER, VOLUME)
    stage = asyncio.create_task(running.run(key, "NodeStageVolume", None, gate.wait))
    await asyncio.sleep(0)
    gathering = coalescer(applications, running)
    for task in await asked(gathering, limits(read_iops=10), size(7)):
        with pytest.raises(operations.OperationInProgress, match="NodeStageVolume"):
            await task
    gate.set()
    await stage
    assert await gathering.ask(VOLUME, limits(read_iops=10)) == Outcome()


async def test_coalescer_after_drain_applies_nothing(
    applications: Applications, running: operations.KeyedOperations
) -> None:
    gathering = coalescer(applications, running)
    await gathering.drain()
    await running.drain()
    with pytest.raises(operations.ShuttingDown):
        await gathering.ask(VOLUME, limits(read_iops=10))
    assert not applications.made


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalesce, "_PAUSES_S", (0.0, 0.0))


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (errors.PeerUnavailable("the handler is absent"), 3),
        (operations.OperationInProgress("vol-1", "NodeStageVolume", 1), 3),
        (errors.NotReady("the handler cannot limit"), 1),
    ],
)
async def test_finish_of_an_interrupted_change_retries_until_a_final_answer(
    applications: Applications,
    running: operations.KeyedOperations,
    error: errors.CrustError,
    tries: int,
) -> None:
    applications.error = error
    await coalescer(applications, running).finish((VOLUME, OTHER))
    assert applications.made == [(VOLUME, Change(limits=())), (OTHER, Change(limits=()))] * tries


@pytest.mark.usefixtures("no_pauses")
async def test_finish_of_an_interrupted_change_succeeds_once_the_guest_is_reachable(
    applications: Applications, running: operations.KeyedOperations
) -> None:
    absent = errors.PeerUnavailable("the handler is absent")
    answers = [Outcome(unmodified=absent), Outcome(), Outcome()]

    async def apply(volume_id: volumes.VolumeId, change: Change) -> Outcome:
        await applications.apply(volume_id, change)
        return answers.pop(0)

    await Coalescer(DRIVER, running, apply, window_s=0).finish((VOLUME, OTHER))
    assert [each for each, _ in applications.made] == [VOLUME, OTHER, VOLUME]
