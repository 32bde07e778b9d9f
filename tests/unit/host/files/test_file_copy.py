"""A copy of a file has its name only when its bytes are durable."""

from pathlib import Path

from crust.host.files import file_copy
from tests.support.faults.syncs import recorded


def test_copy_is_synced_before_its_name_and_the_name_after(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"every byte" * 1000)
    with recorded() as steps:
        file_copy.copy(str(source), str(target), least_bytes=10)
    assert target.read_bytes() == source.read_bytes()
    kinds = [kind for kind, _ in steps]
    assert kinds == ["sync", "name", "sync"]
    assert steps[0][1] not in (str(source), str(target), str(tmp_path))
    assert steps[1:] == [("name", str(target)), ("sync", str(tmp_path))]
