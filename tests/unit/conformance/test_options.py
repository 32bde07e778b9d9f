"""The options of the conformance suite: parameters and endpoints."""

import re
from pathlib import Path

import pytest

from crust.core import errors
from crust_conformance import options
from crust_conformance.options import Parameters


def test_a_parameters_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "parameters.toml"
    path.write_text('size_bytes = 5\nfs_types = ["xfs"]\n[parameters]\ntype = "fast"\n')
    given = options.parameters_of(path)
    assert (given.size_bytes, given.fs_types, given.parameters) == (5, ("xfs",), {"type": "fast"})
    assert options.parameters_of(None) == options.Parameters()


@pytest.mark.parametrize("text", ["size = 5\n", "size_bytes = 0\n", "no toml"])
def test_a_parameters_file_that_is_wrong_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "parameters.toml"
    path.write_text(text)
    with pytest.raises(errors.InvalidRequest, match="cannot be used"):
        options.parameters_of(path)


def test_an_endpoint_is_a_socket() -> None:
    assert options.socket_of("unix:///a/csi.sock") == "/a/csi.sock"
    assert options.socket_of("/a/csi.sock") == "/a/csi.sock"
    for endpoint in ("tcp://localhost:1", "csi.sock", f"/{'a' * 200}"):
        with pytest.raises(errors.InvalidRequest):
            options.socket_of(endpoint)


PAGE = Path(__file__).parents[3] / "docs" / "conformance.md"


@pytest.mark.parametrize("name", Parameters.model_fields)
def test_page_has_each_setting_with_its_meaning(name: str) -> None:
    meaning = " ".join((Parameters.model_fields[name].description or "").split())
    assert re.search(rf"^\| `{name}` \| .* \| {re.escape(meaning)} \|$", PAGE.read_text(), re.M)
