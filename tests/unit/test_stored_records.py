"""Records of every kind are read as they were written; those of a later schema are refused alone."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crust.handoff import mount_info
from crust.handoff.entry import Entry
from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers.block_driver import MIB, Bench, caller
from tests.support.raised import raised
from tests.support.records import pool_layout, stored_records
from tests.support.records.records import TARGET
from tests.support.records.stored_records import (
    GROUP,
    IDS,
    INTENTS,
    RECORD,
    SNAPSHOT,
    VOLUME,
    Stores,
)

_FREE_OR_CLOSED = {"parameters", "metadata"}
"""Objects whose keys are the user's, or that take no others because one could be a secret."""


def _written(root: Path) -> Path:
    """Records of every kind, with every field, as this version writes them."""
    stored_records.write(root)
    return root


def _opened(root: Path) -> Stores:
    stores = Stores(root)
    stores.open()
    return stores


def test_records_of_every_kind_are_read_as_they_were_written(tmp_path: Path) -> None:
    stores = _opened(_written(tmp_path))
    assert stores.pool.ids == IDS
    assert stores.volumes.load(VOLUME).capacity_bytes == 64 * MIB
    assert stores.contents.load(VOLUME).volume_id == VOLUME
    group = stores.sets.load(GROUP)
    [snapshot] = group.snapshots
    assert (snapshot.snapshot_id, snapshot.source_volume_id) == (SNAPSHOT, VOLUME)
    staged, published = stores.node.staged(VOLUME), stores.node.published(TARGET)
    assert staged is not None
    assert staged.paths == ("/staging",)
    assert published is not None
    assert published.deferred
    assert stored_records.read_intents(stores.intents) == INTENTS
    assert _entry(stores).require() == RECORD
    _check_handoff(stores)


def _check_handoff(stores: Stores) -> None:
    entry = _entry(stores)
    assert (entry.require().key, entry.claim_error) == (RECORD.key, None)
    assert entry.claim is not None
    assert entry.claim.sandbox_id == "sandbox-1"
    paths = stores.handoff.layout.entry(TARGET)
    held = mount_info.reserved(Path(paths.record).read_bytes(), TARGET.digest)
    assert held is not None
    assert held.key == RECORD.key


def _save_volume(stores: Stores) -> None:
    stores.volumes.save(stores.volumes.load(VOLUME).but(capacity_bytes=128 * MIB))


def _save_content(stores: Stores) -> None:
    stores.contents.save(stores.contents.load(VOLUME).but(generation=9))


def _save_node_state(stores: Stores) -> None:
    found, published = stores.node.staged(VOLUME), stores.node.published(TARGET)
    assert found is not None
    assert published is not None
    stores.node.note_staged(found.model_copy(update={"paths": ("/other",)}))
    stores.node.note_published(published.model_copy(update={"done": False}))


_REWRITTEN: dict[str, Callable[[Stores], None]] = {
    "pool/volumes/*/volume.json": _save_volume,
    "pool/volumes/*/content.json": _save_content,
    "run/*-*/*.json": _save_node_state,
}


@pytest.mark.parametrize("where", _REWRITTEN)
def test_fields_of_a_later_version_are_kept_by_a_rewrite(tmp_path: Path, where: str) -> None:
    [path] = _written(tmp_path).glob(where)
    path.write_text(json.dumps(_with_later(json.loads(path.read_text()))))
    before = path.read_text()
    _REWRITTEN[where](_opened(tmp_path))
    after = path.read_text()
    assert json.loads(before) != json.loads(after), "it was not rewritten"
    assert _count_later(json.loads(after)) == _count_later(json.loads(before))


def _with_later(value: Any) -> Any:
    """Each object with one more field."""
    if isinstance(value, list):
        return [_with_later(each) for each in value]
    if not isinstance(value, dict):
        return value
    fields = {
        key: each if key in _FREE_OR_CLOSED else _with_later(each) for key, each in value.items()
    }
    return {**fields, "later": {"shiny": True}}


def _count_later(value: Any) -> int:
    children = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    )
    return ("later" in value if isinstance(value, dict) else 0) + sum(map(_count_later, children))


def test_what_a_later_version_adds_to_a_freeze_intent_is_not_read_and_stays_until_the_thaw(
    tmp_path: Path,
) -> None:
    """What is left frozen is thawed on the way back as well."""
    stores = _opened(_written(tmp_path))
    for path in (tmp_path / "run" / "freezes").iterdir():
        path.write_text(path.read_text().removesuffix("\n") + '\0{"later": true}\n')
    assert stored_records.read_intents(stores.intents) == INTENTS
    for each in INTENTS.values():
        assert "later" in (tmp_path / "run" / "freezes" / each.volume_id).read_text()
        stores.intents.forget(each.volume_id)
    assert not any((tmp_path / "run" / "freezes").iterdir())


@pytest.mark.spec("H-16")
def test_keys_of_a_later_version_in_a_handoff_record_are_kept_by_a_rewrite(tmp_path: Path) -> None:
    """An earlier proxy that grows a volume must not remove what a later one reads again after the way back."""
    stores = _opened(_written(tmp_path))
    path = Path(stores.handoff.layout.entry(TARGET).record)
    path.write_text(json.dumps(_with_later(json.loads(path.read_text()))))
    stores.handoff.rewrite(_entry(stores), replace(RECORD.mount, capacity_bytes=7))
    now = json.loads(path.read_text())
    assert (now["crust"]["capacity_bytes"], now["crust"]["generation"]) == (7, 2)
    assert now["later"] == now["crust"]["later"] == {"shiny": True}
    other = replace(RECORD, mount=replace(RECORD.mount, content_generation=8))
    assert stores.handoff.write(other).require().generation == 3
    assert "later" not in path.read_text(), "another publish is another record"


def test_files_that_are_never_rewritten_may_have_fields_of_a_later_version(tmp_path: Path) -> None:
    root = _written(tmp_path)
    for where in ("pool/pool.json", "handoff/*/claim.json"):
        [path] = root.glob(where)
        path.write_text(json.dumps(_with_later(json.loads(path.read_text()))))
    before = (root / "pool" / "pool.json").read_text()
    stores = _opened(root)
    assert stores.pool.ids == IDS
    assert (root / "pool" / "pool.json").read_text() == before
    _check_handoff(stores)


_NEWER: dict[str, tuple[str, Callable[[Stores], object]]] = {
    "pool/volumes/*/volume.json": ("RecordUnreadable", lambda stores: stores.volumes.load(VOLUME)),
    "pool/volumes/*/content.json": (
        "RecordUnreadable",
        lambda stores: stores.contents.load(VOLUME),
    ),
    "pool/snapshots/*/set.json": ("RecordUnreadable", lambda stores: stores.sets.load(GROUP)),
    "handoff/*/mountInfo.json": ("NewerHandoffSchema", lambda stores: _entry(stores).require()),
}


def _entry(stores: Stores) -> Entry:
    entry = stores.handoff.read(TARGET)
    assert entry is not None
    return entry


@pytest.mark.parametrize("where", _NEWER)
def test_record_of_a_newer_schema_is_refused_with_its_number_and_the_start_goes_on(
    tmp_path: Path, where: str
) -> None:
    [path] = _written(tmp_path).glob(where)
    _make_newer(path)
    data = path.read_bytes()
    stores = _opened(tmp_path)
    refused, read = _NEWER[where]
    with raised(refused, match=r"schema (is )?7"):
        read(stores)
    for other in _NEWER.keys() - {where}:
        _NEWER[other][1](stores)
    assert path.read_bytes() == data


def _make_newer(path: Path) -> None:
    plain = json.loads(path.read_text())
    plain.get("crust", plain)["schema"] = 7
    path.write_text(json.dumps(plain))


async def test_driver_with_a_volume_and_a_content_of_newer_schemas_serves_all_others(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    ids = [(await bench.create(name)).volume_id for name in ("newer", "content", "good")]
    _make_newer(pool_layout.volume_record(tmp_path / "state", ids[0]))
    _make_newer(pool_layout.content_record(tmp_path / "state", ids[1]))
    bench.restart()

    listed = await bench.driver.controller.ListVolumes(csi_pb2.ListVolumesRequest(), caller())
    assert {each.volume.volume_id for each in listed.entries} == set(ids)
    capacity = await bench.driver.controller.GetCapacity(csi_pb2.GetCapacityRequest(), caller())
    assert capacity.available_capacity > 0
    for refused in (bench.grow(ids[0], 128 * MIB), bench.delete(ids[0])):
        with raised("RecordUnreadable", match="schema 7"):
            await refused
    with raised("RecordUnreadable", match="schema 7"):
        await bench.stage(ids[1])
    await bench.grow(ids[2], 128 * MIB)
    await bench.create("another")
    await bench.delete(ids[2])
    assert (pool_layout.image(tmp_path / "state", ids[0])).exists()
