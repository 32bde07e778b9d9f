"""Images: made once, never shrunk, never through a link."""

import os
from pathlib import Path

import pytest

from crust.core import errors
from crust.host.files import sparse
from tests.support.faults import lies
from tests.support.faults.syncs import recorded


def test_image_that_is_not_seen_has_perhaps_a_writer(tmp_path: Path) -> None:
    """Every errno but a lease's two refuses: neither "no writer" nor "a writer" was seen."""
    path = str(tmp_path / "a.img")
    Path(path).touch()
    concerns = lies.Concerns(frozenset({path}), ())
    asked = list(
        lies.failures(lambda: sparse.has_writers(path), concerns, errnos_of=lies.all_errnos)
    )
    assert "fcntl" in asked[-1].failure.call
    assert all(isinstance(each.error, errors.CrustError) for each in asked)


def test_create_image_is_sparse_and_never_shrinks(tmp_path: Path) -> None:
    path = str(tmp_path / "a.img")
    sparse.create(path, 1 << 30)
    assert os.stat(path).st_blocks == 0
    assert os.stat(path).st_mode & 0o777 == 0o600
    Path(path).write_bytes(b"data")
    os.truncate(path, 1 << 30)
    with pytest.raises(errors.Conflict):
        sparse.create(path, 1 << 20)
    assert sparse.size_bytes(path) == 1 << 30
    assert sparse.grow(path, 1 << 20) == 1 << 30
    assert sparse.grow(path, 1 << 31) == 1 << 31
    with open(path, "rb") as image:
        assert image.read(4) == b"data"


def test_create_and_grow_sync_the_image(tmp_path: Path) -> None:
    image = str(tmp_path / "a.img")
    with recorded() as steps:
        sparse.create(image, 1 << 20)
    assert steps == [("sync", image)]
    with recorded() as steps:
        sparse.grow(image, 1 << 21)
    assert steps == [("sync", image)]
    with recorded() as steps:
        sparse.grow(image, 1 << 21)
    assert steps == [("sync", image)], "a process that was killed may have grown it"


def test_image_is_hole_before_first_write_and_after_punch(
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
    image.write_bytes(bytes(8192))
    assert not sparse.is_hole(str(image)), "zeros that were written are data"
    os.truncate(image, 0)
    assert not sparse.is_hole(str(image)), "an image without a size is none"
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
