"""The wheel of a tree: the same bytes at each build, and the version of its commit."""

import tempfile
from pathlib import Path

import pytest

from tests.support import environments

pytestmark = pytest.mark.timeout(300)


def test_two_builds_of_a_tree_have_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1790000000")
    built = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as directory:
            wheel = environments.build_wheel(Path(directory))
            built.append((wheel.name, wheel.read_bytes()))
    assert built[0] == built[1]
    assert built[0][0] == f"crust_csi-{environments.version()}-py3-none-any.whl"
