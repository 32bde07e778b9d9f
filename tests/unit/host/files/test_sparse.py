"""Images: made once, never shrunk, never through a link."""

import os
from pathlib import Path

import pytest

from crust.core import errors
from crust.host.files import sparse
from tests.support.faults.syncs import recorded


def test_create_image_is_sparse_and_never_shrinks(tmp_path: Path) -> None:
    path = str(tmp_path / "a.img")
    sparse.create(path, 1 << 30)
    assert os.stat(path).st_blocks == 0
    assert os.stat(path).st_mode & 0o777 == 0o600
    Path(path).write_bytes(b"data")
    os.truncate(path, 1 << 30)
    sparse.create(path, 1 << 20)
    assert sparse.size_bytes(path) == 1 << 30
    assert sparse.grow(path, 1 << 20) == 1 << 30
    assert sparse.grow(path, 1 << 31) == 1 << 31
    with open(path, "rb") as image:
        assert image.read(4) == b"data"
    sparse.remove(path)
    sparse.remove(path)
    assert not sparse.exists(path)


def test_create_and_grow_sync_the_image_and_its_name(tmp_path: Path) -> None:
    image = str(tmp_path / "a.img")
    with recorded() as steps:
        sparse.create(image, 1 << 20)
    assert steps == [("sync", image), ("sync", str(tmp_path))]
    with recorded() as steps:
        sparse.grow(image, 1 << 21)
    assert steps == [("sync", image)]


def test_remove_syncs_the_directory_after_the_name_is_gone(tmp_path: Path) -> None:
    image = str(tmp_path / "a.img")
    sparse.create(image, 1 << 20)
    with recorded() as steps:
        sparse.remove(image)
    assert steps == [("name", image), ("sync", str(tmp_path))]


def test_an_image_is_a_hole_until_a_byte_is_written_and_when_it_is_punched_again(
    tmp_path: Path,
) -> None:
    image = tmp_path / "a.img"
    sparse.create(str(image), 1 << 30)
    assert sparse.is_hole(str(image))
    with image.open("r+b", buffering=0) as file:
        file.seek((1 << 29) + 5)
        file.write(b"x")
        assert not sparse.is_hole(str(image)), "what is not written back yet is data"
        os.fsync(file)
        assert not sparse.is_hole(str(image))
    os.truncate(image, 1 << 20)
    assert sparse.is_hole(str(image))


def test_an_image_of_zeros_that_were_written_is_no_hole(tmp_path: Path) -> None:
    image = tmp_path / "a.img"
    image.write_bytes(bytes(8192))
    assert not sparse.is_hole(str(image))


def test_an_image_without_a_size_is_no_hole(tmp_path: Path) -> None:
    image = tmp_path / "a.img"
    image.touch()
    assert not sparse.is_hole(str(image))
    with pytest.raises(errors.NotFound):
        sparse.is_hole(str(tmp_path / "absent"))


def test_create_on_link_or_directory_is_refused(tmp_path: Path) -> None:
    real, link, pipe = tmp_path / "real", tmp_path / "link", tmp_path / "pipe"
    real.write_bytes(b"untouched")
    link.symlink_to(real)
    os.mkfifo(pipe)
    for path in (link, pipe):
        with pytest.raises(errors.CrustError):
            sparse.create(str(path), 1 << 20)
        with pytest.raises(sparse.NotAnImage):
            sparse.size_bytes(str(path))
    assert real.read_bytes() == b"untouched"
    with pytest.raises(errors.NotFound):
        sparse.grow(str(tmp_path / "absent"), 1)
    with pytest.raises(errors.NotFound):
        sparse.size_bytes(str(tmp_path / "absent"))


def test_space_reports_total_and_available_bytes(tmp_path: Path) -> None:
    space = sparse.space(str(tmp_path))
    assert 0 < space.available_bytes <= space.total_bytes
    assert not space.readonly


def test_allocations_counts_the_blocks_of_regular_files_alone(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x" * 8192)
    sparse.create(str(tmp_path / "hole"), 1 << 20)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("data")
    assert sparse.allocations(str(tmp_path)) == {"data": 8192, "hole": 0}
