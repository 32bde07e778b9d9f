"""Changes of limits that a killed driver had recorded are finished when their guests can be reached."""

from typing import ClassVar

import pytest

from crust.blockdriver.controller import class_parameters, modify_volume
from crust.blockdriver.controller.modify_volume import VolumeModifier
from crust.blockdriver.driver import Driver
from crust.core import errors, operations, volumes

VOLUME = volumes.VolumeId("vol-1")
OTHER = volumes.VolumeId("vol-2")


class Applications(VolumeModifier):
    """What was applied, and the answers to it: None, or an error."""

    answers: ClassVar[list[errors.CrustError | None]]
    made: ClassVar[list[str]]

    def interrupted(self) -> tuple[volumes.VolumeId, ...]:
        return VOLUME, OTHER

    async def modify(self, volume_id: volumes.VolumeId, changes: class_parameters.Changes) -> None:
        assert changes == ()
        self.made.append(volume_id)
        if answer := self.answers.pop(0):
            raise answer


async def finish(state: Driver, answers: list[errors.CrustError | None]) -> list[str]:
    """The volumes whose changes were tried, in order."""
    Applications.answers, Applications.made = answers, []
    modifier = state.controller.modifier
    await Applications(modifier.stores, modifier.enforcement).finish_interrupted()
    return Applications.made


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
async def test_interrupted_change_is_finished_later(
    state: Driver, error: errors.CrustError, tries: int
) -> None:
    made = await finish(state, [error for _ in range(2 * tries)])
    assert made == [VOLUME, OTHER] * tries


async def test_interrupted_change_is_finished_once_the_guest_is_reachable(state: Driver) -> None:
    absent = errors.PeerUnavailable("the handler is absent")
    assert await finish(state, [absent, None, None]) == [VOLUME, OTHER, VOLUME]
