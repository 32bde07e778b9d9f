"""Every answered call was durable: the system calls of the driver and its programs over a volume's whole life."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.drivers import pools, remnants
from tests.support.drivers.block_driver import MIB, Bench
from tests.support.faults import sync_trace
from tests.support.faults.sync_trace import Event
from tests.support.nodes.traced_life import KEPT, SIZES
from tests.support.records import pool_layout

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A directory for pool and pods; what a failed life left is removed."""
    home = tmp_path / "home"
    home.mkdir()
    yield home
    remnants.remove(str(home))


def traced(home: Path, fs_type: str, trace: Path) -> list[Event]:
    argv = (sys.executable, "-m", "tests.support.nodes.traced_life", str(home), fs_type)
    sync_trace.run(argv, trace)
    with trace.open(encoding="utf-8") as lines:
        return sync_trace.events(lines, f"{home}/state")


def late(home: Path, happened: list[Event], *known: str) -> list[str]:
    return list(sync_trace.late(f"{home}/state", happened, known=known))


def syncs_of_the_pool(home: Path, happened: list[Event]) -> list[int]:
    """The places of the syncs after the start, which gives several names before it syncs the first."""
    start = next(place for place, each in enumerate(happened) if each.kind == "mark")
    return [
        place
        for place, each in enumerate(happened)
        if place > start and each.kind == "sync" and each.path.startswith(f"{home}/state/")
    ]


@pytest.mark.parametrize("fs_type", list(SIZES))
def test_each_answer_of_a_life_is_sent_after_all_it_wrote_was_synced_in_order(
    home: Path, tmp_path: Path, fs_type: str
) -> None:
    happened = traced(home, fs_type, tmp_path / "trace")
    assert late(home, happened) == []

    syncs = syncs_of_the_pool(home, happened)
    assert len(syncs) > 60
    needless = [
        place for place in syncs if not late(home, happened[:place] + happened[place + 1 :])
    ]
    assert needless == [], "the rules do not see that these syncs are absent, or nobody needs them"


def test_each_answer_on_a_pool_that_clones_files_is_sent_after_all_it_wrote_was_synced(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    with pools.mounted("xfs", tmp_path, home, size=3072 * MIB):
        happened = traced(home, "ext4", tmp_path / "trace")
    assert late(home, happened) == []
    assert any(each.kind == "write" and each.path.endswith(".crust-tmp") for each in happened)


def test_mkfs_writes_after_the_record_of_its_intent_and_is_synced_before_that_of_its_end(
    home: Path, tmp_path: Path
) -> None:
    happened = traced(home, "ext4", tmp_path / "trace")
    program = next(
        each for each in happened if each.path.startswith("/dev/loop") and each.kind == "write"
    )
    before, after = (
        [each for each in some if each.kind == "name" and each.path.endswith("/content.json")]
        for some in (happened[: happened.index(program)], happened[happened.index(program) :])
    )
    assert before
    assert after
    without = [
        each
        for each in happened
        if each.process != program.process or each.kind != "sync" or each.ended > after[0].ended
    ]
    assert [line for line in late(home, without) if program.path in line]


def test_a_start_syncs_the_names_that_a_killed_driver_may_have_left_unsynced(
    home: Path, tmp_path: Path
) -> None:
    traced(home, "ext4", tmp_path / "first")
    known = [f"{home}/state", *(str(each) for each in (home / "state").rglob("*") if each.is_dir())]
    assert len(known) == 4
    happened = traced(home, "ext4", tmp_path / "second")
    assert late(home, happened, *known) == []
    for each in known:
        without = [event for event in happened if (event.kind, event.path) != ("sync", each)]
        assert late(home, without, *known), f"nothing says that {each} is not synced"


def test_an_image_that_a_killed_driver_grew_is_synced_before_the_retry_is_answered(
    home: Path, tmp_path: Path
) -> None:
    traced(home, "ext4", tmp_path / "first")
    bench = Bench(home)
    image = pool_layout.image(home / "state", bench.ids.volume_id(KEPT))
    del bench
    os.truncate(image, SIZES["ext4"] + 16 * MIB)
    happened = traced(home, "ext4", tmp_path / "second")
    record = next(
        each for each in happened if each.kind == "name" and each.path.endswith("/volume.json")
    )
    synced = [each for each in happened if (each.kind, each.path) == ("sync", str(image))]
    assert synced
    assert synced[0].ended < record.began
