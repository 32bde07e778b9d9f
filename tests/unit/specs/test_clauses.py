"""The specifications: clauses are numbered and tested, and each vector is computed or read back."""

import ast
import base64
import functools
import hashlib
import json
import os
import re
import tomllib
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crust.core import errors, volumes
from crust.handoff import claims, layout
from crust.handoff.record import Record
from tests.support.records.records import TARGET
from tests.support.tree import SHIPPED
from tests.unit.specs import wire_table

ROOT = Path(__file__).parents[3]
CLAUSE = re.compile(r"^- \*\*([DHN]-\d+)\*\* (.*?)(?=^- \*\*|^## |\Z)", re.MULTILINE | re.DOTALL)
PAGES = {"D": "deferral.md", "H": "handoff.md", "N": "node-identity.md"}
OF_THE_GUEST = {"H-12", "H-34"}
"""Duties of the kernel that mounts, which no test of ours can break."""


def _clauses_of(letter: str) -> list[tuple[str, str]]:
    page = ROOT / "specs" / PAGES[letter]
    return CLAUSE.findall(page.read_text(encoding="utf-8"))


CLAUSES = dict(clause for letter in PAGES for clause in _clauses_of(letter))


@functools.cache
def _named() -> dict[str, list[str]]:
    """Clause to the tests that carry its marker, from the source: no test needs to be imported."""
    named: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                for clause in _markers(node.decorator_list):
                    named[clause].append(f"{path.name}::{node.name}")
    return named


def _markers(decorators: list[ast.expr]) -> list[str]:
    return [
        str(argument.value)
        for decorator in decorators
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.spec"
        for argument in decorator.args
        if isinstance(argument, ast.Constant)
    ]


@pytest.mark.parametrize(("letter", "least"), [("D", 28), ("H", 56), ("N", 10)])
def test_clauses_are_numbered_without_gaps(letter: str, least: int) -> None:
    names = [name for name, _ in _clauses_of(letter)]
    expected = [f"{letter}-{number}" for number in range(1, len(names) + 1)]
    assert sorted(names) == sorted(expected)
    assert letter == "H" or names == expected, "in order"
    assert len(names) >= least


@pytest.mark.parametrize("clause", sorted(CLAUSES.keys() - OF_THE_GUEST))
def test_clause_has_an_obligation_and_a_test(clause: str) -> None:
    assert any(word in CLAUSES[clause] for word in ("MUST", "SHOULD", "decided once"))
    assert _named()[clause], f"no test is marked spec({clause!r})"


def test_no_test_names_a_clause_that_does_not_exist() -> None:
    named = {clause for clause in _named() if clause.partition("-")[0] in PAGES}
    assert sorted(named - CLAUSES.keys()) == []


def test_every_clause_that_the_code_or_a_decision_cites_exists() -> None:
    cited = {
        clause
        for folder in (*SHIPPED, "docs/decisions")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md")
        for clause in re.findall(r"\b[DHN]-\d+\b", path.read_text(encoding="utf-8"))
    }
    assert sorted(cited - CLAUSES.keys()) == []


VECTORS = ROOT / "specs" / "vectors"


def _all(name: str) -> list[dict[str, Any]]:
    vectors: list[dict[str, Any]] = json.loads((VECTORS / name).read_text())
    assert vectors
    return vectors


@pytest.mark.spec("H-1")
def test_digests_are_those_of_the_paths_bytes() -> None:
    for vector in _all("digests.json"):
        assert hashlib.sha256(vector["target_path"].encode()).hexdigest() == vector["digest"]


def test_lock_is_beside_the_record_in_the_entry() -> None:
    vector = json.loads((VECTORS / "locks.json").read_text())
    digest = hashlib.sha256(vector["target_path"].encode()).hexdigest()
    assert vector["lock"] == f"/run/crust/volumes/{digest}/claim.lock"
    assert vector["record"] == f"/run/crust/volumes/{digest}/mountInfo.json"


def test_identities_are_those_of_the_device_numbers() -> None:
    for vector in _all("identities.json"):
        identity = vector["identity"]
        assert (os.major(vector["st_rdev"]), os.minor(vector["st_rdev"])) == (
            identity["major"],
            identity["minor"],
        )


RECORDS = _all("records.json")


@pytest.mark.parametrize("vector", RECORDS, ids=[vector["name"] for vector in RECORDS])
def test_record_is_accepted_or_refused_as_the_vector_says(vector: dict[str, Any]) -> None:
    data = base64.b64decode(vector.get("base64", "")) or vector["text"].encode()
    if not vector["accepted"]:
        with pytest.raises(errors.Corrupt):
            Record.parse(data, digest=vector["entry"])
        return
    record = Record.parse(data, digest=vector["entry"])
    value = vector["value"]
    if "image" in value:
        image = value["image"]
        assert record.image == volumes.NetworkImage(
            **image | {"monitors": tuple(image["monitors"])}
        )
    else:
        assert record.device == value["device"]
    assert record.readonly is value["readonly"]
    assert (record.mount.group.gid if record.mount.group else None) == value["group"]
    assert replace(volumes.IoLimits(), **value["limits"]) == record.mount.io_limits


def test_both_kinds_of_records_are_there() -> None:
    refused = {vector["clause"] for vector in RECORDS if not vector["accepted"]}
    assert refused >= {"H-5", "H-6", "H-7", "H-8", "H-9"}
    assert len([vector for vector in RECORDS if vector["accepted"]]) >= 7


CLAIMS = _all("claims.json")


@pytest.mark.parametrize("vector", CLAIMS, ids=[vector["name"] for vector in CLAIMS])
def test_claim_is_judged_as_its_vector_says(tmp_path: Path, vector: dict[str, Any]) -> None:
    paths = layout.Layout(str(tmp_path)).entry(TARGET)
    os.makedirs(paths.directory, 0o700)
    os.close(os.open(paths.claim_lock, os.O_RDWR | os.O_CREAT, 0o600))
    descriptor = os.open(paths.claim, os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(descriptor, vector["text"].encode())
    os.close(descriptor)
    if vector["accepted"]:
        claim = claims.read(paths)
        assert claim is not None
        assert claim.sandbox_id == "sandbox-1"
    else:
        with pytest.raises(errors.Corrupt):
            claims.read(paths)


# csi.proto is typed by hand: the compiled descriptor is held against the specification's names and numbers.


ADDITIONS = Path(__file__).with_name("csi-additions.txt")


def _additions() -> set[str]:
    lines = ADDITIONS.read_text(encoding="utf-8").splitlines()
    return {line for line in lines if not line.startswith("#")}


def test_wire_table_is_complete() -> None:
    facts = wire_table.of_table()
    assert sum(fact.startswith("service ") for fact in facts) == 5
    assert sum(" rpc " in fact for fact in facts) == 39
    assert sum("[csi_secret]" in fact for fact in facts) == 22
    assert sum("(oneof " in fact for fact in facts) == 9
    assert "SnapshotMetadata rpc GetMetadataDelta(GetMetadataDeltaRequest)" in {
        fact.partition(" ->")[0] for fact in facts
    }


def test_every_field_of_the_specification_exists() -> None:
    assert sorted(wire_table.of_table() - wire_table.of_descriptor()) == []


@pytest.mark.spec("D-1", "D-2", "N-1")
def test_additions_are_exactly_the_documented_ones() -> None:
    assert wire_table.of_descriptor() - wire_table.of_table() == _additions()


@pytest.mark.spec("D-1", "D-2", "N-1")
def test_additions_use_no_number_of_the_specification() -> None:
    """Fields and enum values of one scope; the numbers that 1.13 reserves are those of the 1.12 condition."""
    numbered = re.compile(r"^(\S+) (?:(\d+): |\w+ = (\d+))")
    taken = {
        (match[1], match[2] or match[3])
        for fact in wire_table.of_table()
        if (match := numbered.match(fact))
    }
    added = [match for fact in _additions() if (match := numbered.match(fact))]
    assert len(added) >= 30
    assert [match[0] for match in added if (match[1], match[2] or match[3]) in taken] == []


def test_wrong_line_of_the_additions_is_detected() -> None:
    facts = wire_table.of_descriptor()
    assert "NodePublishVolumeRequest 9: bool defer_fs_ops [alpha]" in facts
    assert "NodePublishVolumeRequest 9: string defer_fs_ops [alpha]" not in facts
    assert "NodePublishVolumeRequest 9: bool defer_fs_ops" not in facts


# Generated code refuses older runtimes at import, so the floors of our dependencies are the generator's versions.


WIRE = sorted((ROOT / "crust" / "wire").rglob("*_pb2*.py"))


def _floor(name: str) -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = " ".join(project["dependencies"])
    match = re.search(rf"\b{name}>=([\d.]+)", text)
    assert match is not None
    return match[1]


def test_there_is_generated_code() -> None:
    assert len(WIRE) >= 10


@pytest.mark.parametrize(
    ("dependency", "pattern"),
    [
        ("grpcio", r"GRPC_GENERATED_VERSION = '([\d.]+)'"),
        ("protobuf", r"# Protobuf Python Version: ([\d.]+)"),
    ],
)
def test_floor_of_dependency_is_the_generators_version(dependency: str, pattern: str) -> None:
    texts = [path.read_text(encoding="utf-8") for path in WIRE]
    assert {version for text in texts for version in re.findall(pattern, text)} == {
        _floor(dependency)
    }
