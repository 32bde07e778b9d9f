"""Directories that are held open: their paths lead to what was opened, and errors name what people know."""

from pathlib import Path

import pytest

from crust.core import errors
from crust.host.files import durable
from crust.host.files.durable import DirectoryReplaced, HeldDirectory
from tests.support.raised import raised


def held(path: Path) -> HeldDirectory:
    path.mkdir()
    made = HeldDirectory(str(path))
    made.hold()
    return made


def test_a_held_path_leads_to_the_directory_that_was_opened(tmp_path: Path) -> None:
    directory = held(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    durable.make_directory(directory / "c", 0o700)
    durable.write_file(directory / "c" / "file", b"1")
    assert (tmp_path / "b" / "c" / "file").read_bytes() == b"1"
    assert not (tmp_path / "a").exists()


def test_errors_name_the_path_that_people_know(tmp_path: Path) -> None:
    directory = held(tmp_path / "a")
    with pytest.raises(errors.NotFound) as caught:
        durable.write_file(directory / "absent" / "file", b"")
    assert f"{tmp_path}/a/absent/file" in str(caught.value)
    assert "/proc/" not in str(caught.value)
    (tmp_path / "a" / "link").symlink_to("x")
    with pytest.raises(errors.CrustError) as linked:
        durable.read(directory / "link", limit_bytes=1)
    assert "/proc/" not in str(linked.value)


def test_path_below_a_released_directory_is_refused(tmp_path: Path) -> None:
    directory = held(tmp_path / "a")
    path = f"/proc/self/fd/{directory.descriptor()}/file"
    directory.let_go()
    with raised("DirectoryNotHeld"):
        durable.write_file(directory / "file", b"")
    # a thread that looked the path up before is led nowhere either, whatever was opened since
    with (tmp_path / "other").open("w"), pytest.raises(NotADirectoryError):
        Path(path).write_bytes(b"")
    directory.hold()
    assert f"/proc/self/fd/{directory.descriptor()}/file" == path
    durable.write_file(directory / "file", b"")


def with_folder(tmp_path: Path) -> HeldDirectory:
    directory = held(tmp_path / "a")
    durable.make_directory(directory / "folder", 0o700)
    directory.hold_folder("folder")
    return directory


def test_held_folder_is_reached_after_another_one_took_its_name(tmp_path: Path) -> None:
    directory, folder = with_folder(tmp_path), tmp_path / "a" / "folder"
    directory.check_in_place()
    folder.rename(tmp_path / "moved")
    folder.mkdir()
    durable.make_directory(directory / "folder", 0o700)
    durable.write_file(directory / "folder" / "file", b"1")
    durable.make_directory(directory / "folder" / "deep", 0o700)
    assert {path.name for path in (tmp_path / "moved").iterdir()} == {"file", "deep"}
    assert not any(folder.iterdir())
    with pytest.raises(DirectoryReplaced, match=f"{folder} is not the directory"):
        directory.check_in_place()
    folder.rmdir()
    with pytest.raises(DirectoryReplaced, match=f"{folder} is not the directory"):
        directory.check_in_place()


def test_folder_is_released_with_its_directory_and_held_again(tmp_path: Path) -> None:
    directory, folder = with_folder(tmp_path), tmp_path / "a" / "folder"
    path = (directory / "folder" / "file").__fspath__()
    directory.let_go()
    with raised("DirectoryNotHeld"):
        durable.write_file(directory / "folder" / "file", b"")
    with pytest.raises(NotADirectoryError):
        Path(path).write_bytes(b"")
    folder.rename(tmp_path / "moved")
    folder.mkdir()
    directory.hold()
    directory.hold_folder("folder")
    directory.check_in_place()
    durable.write_file(directory / "folder" / "file", b"")
    assert (folder / "file").exists()


def test_a_link_is_not_held_as_a_folder(tmp_path: Path) -> None:
    directory = held(tmp_path / "a")
    (tmp_path / "a" / "folder").symlink_to(tmp_path)
    with pytest.raises(errors.CrustError):
        directory.hold_folder("folder")
    assert (directory / "folder").__fspath__() == f"/proc/self/fd/{directory.descriptor()}/folder"
