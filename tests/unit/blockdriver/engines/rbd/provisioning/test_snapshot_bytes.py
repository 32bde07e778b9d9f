"""The sum of what the snapshots of a namespace add, while others change what it must ask for."""

from typing import Any, cast

from crust.blockdriver.engines.rbd.namespace import Namespace
from crust.blockdriver.engines.rbd.provisioning.snapshot_bytes import SnapshotBytes


class Answered(SnapshotBytes):
    """One image, whose snapshots add what a test says."""

    added_bytes = 1

    def __init__(self) -> None:
        super().__init__(cast("Namespace", None), lambda _: None)

    def images(self) -> dict[str, str]:
        return {"id": "name"}

    def _answer(self, image_id: str, *, again: bool = True) -> int:
        return self.added_bytes


class Overtaken:
    """A lock; before it is taken for the first time all images become due."""

    def __init__(self, sums: SnapshotBytes) -> None:
        self._sums, self._guard = sums, sums._guard

    def __enter__(self) -> None:
        if self._sums._guard is not self._guard:
            self._sums._guard = self._guard
            self._sums.ask_anew()
        self._guard.acquire()

    def __exit__(self, *_: object) -> None:
        self._guard.release()


def test_all_images_due_during_a_question_are_asked_by_it() -> None:
    """As when a controller takes a namespace over while a call asks for its space."""
    sums = Answered()
    assert sums.total() == 1
    sums.added_bytes = 2
    assert sums.total() == 1
    cast("Any", sums)._guard = Overtaken(sums)
    assert sums.total() == 2
