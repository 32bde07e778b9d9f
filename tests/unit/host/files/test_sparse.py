"""Images: made once, never shrunk, never through a link."""

import os
from pathlib import Path

import pytest

from crust import errors
from crust.host.files import sparse


def test_an_image_takes_no_space_and_grows_only(tmp_path: Path) -> None:
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


def test_what_is_no_image_is_neither_made_one_nor_followed(tmp_path: Path) -> None:
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


def test_the_room_of_a_filesystem_is_told(tmp_path: Path) -> None:
    space = sparse.space(str(tmp_path))
    assert 0 < space.available_bytes <= space.total_bytes
    assert not space.readonly


def test_allocations_counts_the_blocks_of_regular_files_alone(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x" * 8192)
    sparse.create(str(tmp_path / "hole"), 1 << 20)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("data")
    assert sparse.allocations(str(tmp_path)) == {"data": 8192, "hole": 0}
