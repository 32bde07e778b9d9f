"""A wrapped volume with one target: no failure and no kill robs a guest, and a wrong decision is found.

The model is tests/support/leaf_model.py.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crust.core import volumes
from crust.csi_shim.wrap import leaves
from crust.csi_shim.wrap.leaves import Kind, LeafState, LeafUse
from crust.host.process import workers
from crust.rpc.status import DriverOutcome, Residue, Undo
from tests.support.faults.choices import Choices
from tests.support.leaf_model import Model, Shim, World, explore
from tests.support.raised import raised


async def test_no_failure_and_no_kill_robs_a_guest(monkeypatch: pytest.MonkeyPatch) -> None:
    states, runs = await explore(monkeypatch)
    assert states >= 10
    assert runs >= 400


@pytest.mark.parametrize("mounts", [0, 1])
async def test_device_under_a_guest_is_not_given_back(
    monkeypatch: pytest.MonkeyPatch, mounts: int
) -> None:
    """Also one whose node the driver has made itself, without a bind."""

    def look(_: Model, path: str) -> LeafState:
        return LeafState(Kind.DEVICE, 1, mounts, mounts, is_begun=True)

    async def run(function: Any, *args: Any) -> Any:
        return function(*args)

    monkeypatch.setattr(workers, "run", run)
    monkeypatch.setattr(Model, "look", look)
    world = World(has_directory=True, leaf="device", is_published=True, guest=True)
    assert await Shim(monkeypatch).call("unpublish", world, Choices()) == "final"
    assert world.is_published


@pytest.mark.spec("D-42")
@pytest.mark.parametrize(("sources", "state"), [(1, LeafUse.OTHER), (2, LeafUse.DEVICE)])
def test_mounts_of_different_files_may_hide_a_guests_device(sources: int, state: LeafUse) -> None:
    """With no device on top: a retry must not take the leaf down. Two mounts of one file are one of the driver's."""
    seen = leaves.LeafState(leaves.Kind.FILE, 0, mounts=2, sources=sources, is_begun=True)
    assert leaves.use_of(seen) is state


UNDO_PLAN, USE_OF = leaves.undo_plan, leaves.use_of


def _new_if(state: LeafUse, seen: LeafUse) -> LeafUse:
    return LeafUse.NEW if seen is state else seen


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        (
            "undo_plan",
            lambda state, outcome, **now: UNDO_PLAN(_new_if(LeafUse.BEGUN, state), outcome, **now),
        ),
        (
            "undo_plan",
            lambda state, outcome, **now: UNDO_PLAN(_new_if(LeafUse.DEVICE, state), outcome, **now),
        ),
        (
            "undo_plan",
            lambda state, outcome, **now: (
                Undo.REMOVE if outcome is DriverOutcome.SILENT else UNDO_PLAN(state, outcome, **now)
            ),
        ),
        ("use_of", lambda seen: LeafUse.OTHER if seen.mounts else USE_OF(seen)),
        ("residue_of", lambda *_: Residue.NONE),
    ],
)
async def test_model_finds_a_decision_that_is_wrong(
    name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaves, name, wrong)
    with pytest.raises(AssertionError):
        await explore(monkeypatch)


@pytest.mark.spec("D-42")
def test_leaf_under_two_mounted_files_may_be_a_guests_device() -> None:
    """A file covers the device: a retry that took the leaf down would take the device from the guest."""
    covered = LeafState(Kind.FILE, 0, mounts=2, sources=2, is_begun=True)
    assert leaves.use_of(covered) is LeafUse.DEVICE
    assert leaves.use_of(replace(covered, sources=1)) is LeafUse.OTHER
    assert (
        leaves.undo_plan(leaves.use_of(covered), DriverOutcome.ANSWERED, is_mounted=True)
        is Undo.NOTHING
    )


@pytest.mark.parametrize(
    ("driver", "remedy"),
    [
        ("diskplugin.csi.alibabacloud.com", "RuntimeClass rund or runv"),
        ("block.csi.example.com", "may not support raw block volumes"),
    ],
)
def test_driver_without_a_device_is_named(driver: str, remedy: str, tmp_path: Path) -> None:
    key = volumes.VolumeKey(volumes.DriverName(driver), volumes.VolumeId("d-1"))
    with raised("NotPublishedAsBlock") as caught:
        leaves.device(key, str(tmp_path / "leaf"), None)
    assert driver in caught.value.why
    assert remedy in (caught.value.hint or "")
