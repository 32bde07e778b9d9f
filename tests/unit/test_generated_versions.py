"""Generated code refuses older runtimes at import, so the floors of our dependencies are the generator's versions."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
WIRE = sorted((ROOT / "crust" / "wire").rglob("*_pb2*.py"))


def _floor(name: str) -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (found,) = [each for each in project["dependencies"] if re.match(rf"{name}\W", each)]
    match = re.search(r">=([\d.]+)", found)
    assert match is not None
    return match[1]


def test_there_is_generated_code() -> None:
    assert len(WIRE) >= 10


def test_the_floor_of_grpcio_is_the_generators_version() -> None:
    pattern = re.compile(r"GRPC_GENERATED_VERSION = '([\d.]+)'")
    versions = {
        match[1] for path in WIRE if (match := pattern.search(path.read_text(encoding="utf-8")))
    }
    assert versions == {_floor("grpcio")}


def test_the_floor_of_protobuf_is_the_generators_version() -> None:
    pattern = re.compile(r"# Protobuf Python Version: ([\d.]+)")
    versions = {
        match[1] for path in WIRE if (match := pattern.search(path.read_text(encoding="utf-8")))
    }
    assert versions == {_floor("protobuf")}
