"""Changes of limits that a killed driver had recorded are finished when their guests can be reached."""

from dataclasses import dataclass, field

import pytest

from crust.blockdriver.controller import modify_volume
from crust.blockdriver.controller.modify_volume import Change, InterruptedChanges, Outcome
from crust.core import errors, operations, volumes

DRIVER = volumes.DriverName("block.csi.crust.dev")
VOLUME = volumes.VolumeId("vol-1")
OTHER = volumes.VolumeId("vol-2")


@dataclass
class Applications:
    """What was applied, and the answers to it."""

    answers: list[Outcome | errors.CrustError]
    made: list[tuple[str, Change]] = field(default_factory=list)

    async def apply(self, volume_id: volumes.VolumeId, change: Change) -> Outcome:
        self.made.append((volume_id, change))
        answer = self.answers.pop(0)
        if isinstance(answer, errors.CrustError):
            raise answer
        return answer


async def finish(applications: Applications) -> None:
    running = operations.KeyedOperations()
    interrupted = InterruptedChanges(DRIVER, running, lambda: (VOLUME, OTHER), applications.apply)
    await interrupted.finish()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modify_volume, "_PAUSES_S", (0.0, 0.0))


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (errors.PeerUnavailable("the handler is absent"), 3),
        (operations.OperationInProgress("vol-1", "NodeStageVolume", 1), 3),
        (errors.NotReady("the handler cannot limit"), 1),
    ],
)
async def test_interrupted_change_is_finished_later(error: errors.CrustError, tries: int) -> None:
    answers: list[Outcome | errors.CrustError] = [error for _ in range(2 * tries)]
    applications = Applications(answers)
    await finish(applications)
    assert applications.made == [(VOLUME, Change(limits=())), (OTHER, Change(limits=()))] * tries


async def test_finish_of_an_interrupted_change_succeeds_once_the_guest_is_reachable() -> None:
    absent = errors.PeerUnavailable("the handler is absent")
    applications = Applications([Outcome(unmodified=absent), Outcome(), Outcome()])
    await finish(applications)
    assert [each for each, _ in applications.made] == [VOLUME, OTHER, VOLUME]
