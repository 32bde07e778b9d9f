"""A held directory: where its paths lead, and what people read."""

from pathlib import Path

import pytest

from crust import errors
from crust.host.files import durable
from crust.host.files.held_directory import DirectoryNotHeld, HeldDirectory


def held(path: Path) -> HeldDirectory:
    path.mkdir()
    made = HeldDirectory(str(path))
    made.hold()
    return made


def test_a_held_path_leads_to_the_directory_that_was_opened(tmp_path: Path) -> None:
    directory = held(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    durable.make_directory(directory / "c", 0o700)
    durable.publish(directory / "c" / "file", b"1")
    assert (tmp_path / "b" / "c" / "file").read_bytes() == b"1"
    assert not (tmp_path / "a").exists()


def test_errors_name_the_path_that_people_know(tmp_path: Path) -> None:
    directory = held(tmp_path / "a")
    with pytest.raises(errors.NotFound) as caught:
        durable.publish(directory / "absent" / "file", b"")
    assert f"{tmp_path}/a/absent/file" in str(caught.value)
    assert "/proc/" not in str(caught.value)
    (tmp_path / "a" / "link").symlink_to("x")
    with pytest.raises(errors.CrustError) as linked:
        durable.read(directory / "link", limit_bytes=1)
    assert "/proc/" not in str(linked.value)


def test_a_directory_that_was_let_go_is_reached_by_no_path(tmp_path: Path) -> None:
    directory = held(tmp_path / "a")
    path = f"/proc/self/fd/{directory.descriptor()}/file"
    directory.let_go()
    with pytest.raises(DirectoryNotHeld):
        durable.publish(directory / "file", b"")
    # a thread that looked the path up before is led nowhere either, whatever was opened since
    with (tmp_path / "other").open("w"), pytest.raises(NotADirectoryError):
        Path(path).write_bytes(b"")
    directory.hold()
    assert f"/proc/self/fd/{directory.descriptor()}/file" == path
    durable.publish(directory / "file", b"")
