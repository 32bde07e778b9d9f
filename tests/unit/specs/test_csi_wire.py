"""csi.proto is typed by hand: the compiled descriptor is held against the specification's names and numbers."""

import re
from pathlib import Path

import pytest

from tests.unit.specs import wire_table

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
