"""The list of taken images on disk."""

from dataclasses import replace
from pathlib import Path

import pytest

from crust.core import volumes
from examples.kata.runtime.taken_images import Taken, TakenImages
from tests.support.records.records import IMAGE, TARGET

ONE = Taken("uuid-1", volumes.SandboxId("one"), TARGET, IMAGE)


def test_next_process_reads_what_was_added_and_not_removed(tmp_path: Path) -> None:
    first = TakenImages(tmp_path / "images")
    assert first.all() == ()
    two = replace(ONE, vm_id="uuid-2")
    for taken in (ONE, ONE, two):
        first.add(taken)
    first.remove(ONE.vm_id, TARGET)
    first.remove(ONE.vm_id, TARGET)
    assert TakenImages(tmp_path / "images").all() == (two,)


def test_unreadable_file_is_reported_and_kept_and_others_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken = TakenImages(tmp_path)
    taken.add(ONE)
    (tmp_path / "a.json").write_text('{"vm_id": 1}')
    (tmp_path / "b.json").mkdir()
    assert taken.all() == (ONE,)
    assert caplog.text.count("cannot be read") == 2
    assert (tmp_path / "a.json").exists()
