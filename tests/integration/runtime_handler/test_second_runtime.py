"""A runtime that shares no code with crust keeps the contract: test vectors, and `crust conformance --runtime`."""

import ast
import base64
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from crust.cli.main import main
from crust.conformance import catalogue
from examples import second_runtime

CHECKOUT = Path(__file__).parents[3]
VECTORS = CHECKOUT / "specs" / "vectors"
NEED_A_FEATURE = {"R-212", "R-302", "R-303", "R-304", "R-305", "R-306"}
"""R-212 is for runtimes without READ_ONLY, the others for those with STATS, ONLINE_EXPAND or FREEZE."""
NEED_A_KEEPER = {"R-110", "R-111", "R-112", "R-113"}


def _all(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((VECTORS / name).read_text())
    assert found
    return found


def test_second_runtime_imports_nothing_of_crust() -> None:
    tree = ast.parse(Path(second_runtime.__file__).read_text())
    names = {
        name
        for node in ast.walk(tree)
        for name in (
            [each.name for each in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        )
    }  # fmt: skip
    assert {name.partition(".")[0] for name in names} <= {"grpc", *sys.stdlib_module_names}


@pytest.mark.parametrize("vector", _all("records.json"), ids=lambda each: each["name"])
def test_second_runtime_agrees_with_the_vectors(vector: dict[str, Any]) -> None:
    data = base64.b64decode(vector.get("base64", "")) or vector["text"].encode()
    if not vector["accepted"]:
        with pytest.raises(second_runtime.Refused):
            second_runtime.parse(data, vector["entry"])
        return
    found = second_runtime.parse(data, vector["entry"])
    assert found["crust"]["handler"] == vector["value"]["handler"]
    assert found["crust"].get("identity") == vector["value"].get("identity")


def test_second_runtime_computes_digests_and_identities_of_the_vectors() -> None:
    for each in _all("digests.json"):
        assert second_runtime.digest(each["target_path"]) == each["digest"]
    for each in _all("identities.json"):
        assert second_runtime.identity(each["st_rdev"], each["diskseq"]) == each["identity"]


@pytest.mark.root
@pytest.mark.timeout(300)
def test_second_runtime_breaks_no_duty(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    program = f"{sys.executable} {second_runtime.__file__}"
    command = f"{program} {{registry}} {{directory}}/second.sock {{directory}}/targets"
    ran = CliRunner().invoke(main, ["conformance", "--runtime", command, "--json", str(report)])
    outcomes = {case["number"]: case["outcome"] for case in json.loads(report.read_text())["cases"]}
    assert outcomes == {
        number: "skipped" if number in NEED_A_FEATURE | NEED_A_KEEPER else "passed"
        for number in catalogue.cases("R")
    }, ran.output
    assert ran.exit_code == 0
