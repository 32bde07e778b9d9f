"""The images of guests: digests, and directories that are whole or not there."""

from pathlib import Path

import pytest

from examples.kata.guest import faults, image


def test_digest_depends_on_part_boundaries() -> None:
    assert image.digest_of([b"ab", b"c"]) != image.digest_of([b"a", b"bc"])
    assert image.digest_of([b"ab", b"c"]) == image.digest_of([b"ab", b"c"])


def test_a_build_that_fails_leaves_no_directory(tmp_path: Path) -> None:
    target = tmp_path / "image-x"

    def build() -> None:
        with image._aside(target) as directory:
            (directory / "half").write_text("done")
            raise faults.KernelModuleMissing("x")

    with pytest.raises(faults.KernelModuleMissing):
        build()
    assert list(tmp_path.iterdir()) == []


def test_lock_removes_directories_of_a_killed_build(tmp_path: Path) -> None:
    (tmp_path / ".building-image-x" / "tree").mkdir(parents=True)
    with image._locked(tmp_path):
        assert [p.name for p in tmp_path.iterdir()] == [".lock"]
