"""A missing capability skips by default, and fails where it is required."""

import pytest

from tests.support import capabilities


@pytest.fixture(autouse=True)
def _lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capabilities._PROBES, "wings", lambda: "none grew")
    monkeypatch.setitem(capabilities._PROBES, "legs", lambda: "")


def test_what_is_there_lets_the_test_run() -> None:
    capabilities.need("legs")


def test_what_is_missing_skips_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTS_REQUIRE", "mount,loop")
    with pytest.raises(pytest.skip.Exception, match="needs wings: none grew"):
        capabilities.need("legs", "wings")


def test_what_is_missing_and_required_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTS_REQUIRE", "mount,wings")
    with pytest.raises(pytest.fail.Exception, match="wings is required and missing"):
        capabilities.need("wings")
