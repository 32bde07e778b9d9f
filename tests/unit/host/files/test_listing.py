"""Files by a pattern: all of them, or an error."""

from pathlib import Path

import pytest

from crust.core import errors
from crust.host.answers import NotSeen
from crust.host.files import listing
from tests.support.faults import lies


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("b/2.json", "b/1.json", "a/1.json", "a/1.toml", "top.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.json", ["top.json"]),
        ("*/*.json", ["a/1.json", "b/1.json", "b/2.json"]),
        ("b/2.json", ["b/2.json"]),
        ("absent/*.json", []),
        ("top.json/*", []),
    ],
)
def test_pattern_matches_part_by_part(root: Path, pattern: str, found: list[str]) -> None:
    assert listing.matching(root, pattern) == [root / name for name in found]


def test_directory_that_cannot_be_listed_is_no_empty_list(root: Path) -> None:
    concerns = lies.Concerns(frozenset(), (str(root),))
    asked = [
        *lies.failures(
            lambda: listing.matching(root, "*/*.json"), concerns, errnos_of=lies.all_errnos
        )
    ]
    assert len(asked) == 4 * len(lies.ERRNOS)  # the root, a, b, and the file, which has no names
    assert all(isinstance(each.error, errors.CrustError) for each in asked)


@pytest.mark.parametrize(
    ("name", "is_one"), [("b", True), ("link", True), ("top.json", False), ("top.json/x", False)]
)
def test_directory_is_told_from_file_and_absence(root: Path, name: str, *, is_one: bool) -> None:
    (root / "link").symlink_to("b")
    assert listing.is_directory(f"{root}/{name}") is is_one
    assert not listing.is_directory(f"{root}/absent")


def test_unseen_directory_is_no_absent_one(root: Path) -> None:
    concerns = lies.Concerns(frozenset(), (str(root),))
    asked = [
        *lies.failures(
            lambda: listing.is_directory(f"{root}/b"), concerns, errnos_of=lies.all_errnos
        )
    ]
    assert len(asked) == len(lies.ERRNOS)
    assert all(isinstance(each.error, NotSeen) for each in asked)
