"""The identity of a pool: created once, read afterwards, never created again for a pool that is not empty."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from crust.blockdriver.engines import pool_access
from crust.blockdriver.engines.files import pool
from crust.blockdriver.engines.files.pool import DirectoryPool as Pool
from crust.blockdriver.engines.pool_access import PoolIds
from crust.core import errors
from crust.host.files import durable
from crust.host.files.durable import DirectoryReplaced
from tests.support.faults import crashes
from tests.support.raised import raised
from tests.support.records import pool_layout


def opened(directory: Path) -> PoolIds:
    made = Pool(str(directory), f"{directory}.pool-id", create=True)
    made.open()
    return made.ids


def test_pool_identity_is_made_once_and_read_after_that(tmp_path: Path) -> None:
    first = opened(tmp_path)
    written = (tmp_path / "pool.json").read_bytes()
    pool_layout.directory(tmp_path, first.volume_id("a")).mkdir()
    assert opened(tmp_path) == first
    assert (tmp_path / "pool.json").read_bytes() == written
    (tmp_path / "other").mkdir()
    assert opened(tmp_path / "other") != first


@pytest.mark.parametrize(
    "name", ["volumes/a", "volumes/.new-a", "snapshots/a.json", "snapshots/.new-a"]
)
def test_pool_that_holds_anything_gets_no_new_identity(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir()
    path.touch()
    with raised("PoolIdentityMissing", match=path.name):
        opened(tmp_path)
    assert not (tmp_path / "pool.json").exists()


@pytest.mark.parametrize(
    "change", [{"schema": None}, {"schema": "2"}, {"pool_id": "../x"}, {"pool_id": "0" * 16 + "\n"}]
)
def test_pool_identity_that_is_not_understood_is_refused_and_kept(
    tmp_path: Path, change: dict[str, object]
) -> None:
    opened(tmp_path)
    path = tmp_path / "pool.json"
    text = json.dumps(json.loads(path.read_text()) | change)
    path.write_text(text)
    with pytest.raises(pool.PoolIdentityUnreadable):
        opened(tmp_path)
    assert path.read_text() == text


@pytest.mark.parametrize("folder", pool_layout.FOLDERS)
@pytest.mark.parametrize("kind", ["file", "link to itself", "link to an unmounted disk"])
def test_pool_with_unreadable_folder_gets_no_identity(
    tmp_path: Path, folder: str, kind: str
) -> None:
    """The kernel says neither that the folder is absent nor that it is empty."""
    path = tmp_path / folder
    if kind == "file":
        path.touch()
    else:
        path.symlink_to(folder if kind == "link to itself" else tmp_path / "disk" / folder)
    with pytest.raises(errors.CrustError, match=f"cannot list {path}"):
        opened(tmp_path)
    assert [found.name for found in tmp_path.iterdir()] == [folder]


@pytest.mark.parametrize("errno_of_open", [errno.EACCES, errno.EIO])
def test_pool_whose_folder_cannot_be_opened_gets_no_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errno_of_open: int
) -> None:
    """A disk's error, which no test can make for root."""
    (tmp_path / "volumes" / "a").mkdir(parents=True)
    real = os.open

    def failing(path: os.PathLike[str] | str, flags: int, *args: Any, **kwargs: Any) -> int:
        if os.fspath(path).endswith("/volumes"):
            raise OSError(errno_of_open, os.strerror(errno_of_open))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(errors.CrustError, match="cannot list") as caught:
        opened(tmp_path)
    assert os.strerror(errno_of_open) in str(caught.value)
    assert not (tmp_path / "pool.json").exists()


@pytest.mark.parametrize("number", [-1, 0, pool.SCHEMA - 2, pool.SCHEMA + 1])
def test_pool_of_another_schema_is_refused_whatever_else_it_says(
    tmp_path: Path, number: int
) -> None:
    opened(tmp_path)
    path = tmp_path / "pool.json"
    for text in (
        json.dumps(json.loads(path.read_text()) | {"schema": number}),
        json.dumps({"schema": number, "pool": "another form"}),
    ):
        path.write_text(text)
        with pytest.raises(pool_access.UnknownPoolLayout, match=f"schema {number},"):
            opened(tmp_path)
        assert path.read_text() == text


@pytest.mark.parametrize("has_identity", [False, True])
@pytest.mark.parametrize("name", ["images/a", "records/.a", "volumes-of-later/b/c"])
def test_folder_that_may_hold_volumes_of_another_layout_is_refused(
    tmp_path: Path, name: str, *, has_identity: bool
) -> None:
    if has_identity:
        opened(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.touch()
    with pytest.raises(pool_access.UnknownPoolLayout, match=name.partition("/")[0]):
        opened(tmp_path)
    path.unlink()
    path.parent.rmdir()
    assert [found for found in sorted(tmp_path.rglob("*")) if found not in path.parents] == before


@pytest.mark.parametrize("name", ["lost+found/#12", ".snapshots/1/x", "images/", "README"])
def test_names_that_are_of_no_layout_are_no_obstacle(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith("/"):
        path.mkdir()
    else:
        path.touch()
    assert opened(tmp_path) == opened(tmp_path)


def test_pool_identity_with_field_of_later_version_is_read(tmp_path: Path) -> None:
    first = opened(tmp_path)
    path = tmp_path / "pool.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"label": "fast"}))
    assert opened(tmp_path) == first


def test_pool_identity_killed_anywhere_is_one_after_the_next_start(tmp_path: Path) -> None:
    points = 0
    for number in crashes.crash_points(
        lambda number: (tmp_path / str(number)).mkdir(),
        lambda number: discard(opened(tmp_path / str(number))),
    ):
        points += 1
        directory = tmp_path / str(number)
        ids = opened(directory)
        assert opened(directory) == ids
        assert [path.name for path in directory.iterdir() if path.is_file()] == ["pool.json"]
    assert points > 3


def discard(_: object) -> None:
    """For callers that want no answer."""


def test_pool_is_made_only_on_request(tmp_path: Path) -> None:
    directory = tmp_path / "pool"
    made = Pool(str(directory), f"{tmp_path}/memory")
    with pytest.raises(pool_access.PoolAbsent, match="init-pool"):
        made.open()
    assert not directory.exists()
    directory.mkdir()
    with pytest.raises(pool_access.PoolAbsent, match="init-pool"):
        made.open()
    assert not any(directory.iterdir())
    assert not hasattr(made, "ids")


def test_memory_that_cannot_be_read_opens_no_pool(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.write_text("")
    with pytest.raises(pool.PoolIdentityUnreadable, match="memory"):
        Pool(str(tmp_path / "pool"), str(memory), create=True).open()
    assert not (tmp_path / "pool").exists()


@pytest.fixture
def served(tmp_path: Path) -> Pool:
    """A pool that was served and let go, in the folder `pool`."""
    directory = str(tmp_path / "pool")
    made = Pool(directory, f"{directory}.pool-id", create=True)
    made.open()
    made.let_go()
    return made


def test_other_pool_in_its_place_is_to_be_unmounted(served: Pool, tmp_path: Path) -> None:
    (tmp_path / "pool").rename(tmp_path / "own")
    other = opened(tmp_path / "other")
    (tmp_path / "other").rename(tmp_path / "pool")
    with pytest.raises(pool_access.PoolAbsent, match=other.pool_id) as refusal:
        served.open()
    assert refusal.value.hint.startswith("unmount what is there instead")


def test_folder_that_was_moved_away_is_not_made_again(served: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "pool" / pool_layout.FOLDERS[0]
    folder.rename(tmp_path / "moved")
    with pytest.raises(DirectoryReplaced, match=str(folder)):
        served.open()
    assert not folder.exists()
    (tmp_path / "moved").rename(folder)
    served.open()
    served.check_in_place()


def test_folder_in_place_of_served_one_is_not_served(served: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "pool" / pool_layout.FOLDERS[1]
    folder.rename(tmp_path / "moved")
    folder.mkdir(0o700)
    with pytest.raises(DirectoryReplaced, match=str(folder)):
        served.open()


def test_pool_that_was_restored_in_place_is_served(served: Pool, tmp_path: Path) -> None:
    """With new folders and the old identity, as a backup has them."""
    pool = tmp_path / "pool"
    identity = (pool / "pool.json").read_bytes()
    pool.rename(tmp_path / "old")
    pool.mkdir(0o700)
    durable.write_file(pool / "pool.json", identity)
    served.open()
    served.check_in_place()
