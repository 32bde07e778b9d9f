"""Creating, expanding and deleting volumes on an engine in memory."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

import pytest

from crust.blockdriver.controller import class_parameters, create_volume, topology
from crust.blockdriver.controller.create_volume import Create, Provisioner
from crust.blockdriver.driver import Driver
from crust.blockdriver.engines.pool_access import RecordKind
from crust.blockdriver.records import capability_check, models
from crust.blockdriver.records.models import ContentRecord
from crust.blockdriver.records.node_state import Staged
from crust.blockdriver.snapshots import snapshot_sets
from crust.blockdriver.snapshots.content_source import SourceRequest
from crust.core import deferral_keys, errors, volumes
from tests.support.drivers import driver_state
from tests.support.drivers.block_driver import MIB, Mode, block, mount
from tests.support.drivers.driver_state import create
from tests.support.drivers.memory_backend import POOL_BYTES, MemoryBackend, NewMemoryVolume
from tests.support.faults.crashes import Killed
from tests.support.raised import raised
from tests.support.records import pool_layout

GIB = 1024 * MIB


async def test_volume_id_is_derived_from_any_name(state: Driver, provisioner: Provisioner) -> None:
    names = ["a", "../../etc/passwd", "ü" * 64, "a/b", "x" * 128]
    made = [(await provisioner.create(create(name))).volume_id for name in names]
    assert made == [state.stores.pool.ids.volume_id(name) for name in names]


@pytest.mark.parametrize(
    ("required", "limit", "expected"),
    [
        (0, 0, GIB),
        (0, 100 * MIB, 100 * MIB),
        (1, 0, 16 * MIB),
        (100 * MIB + 1, 0, 101 * MIB),
        (10**9, 10**9, 10**9),
        (64 * MIB, 64 * MIB, 64 * MIB),
    ],
)
async def test_create_size_is_within_required_and_limit(
    provisioner: Provisioner, required: int, limit: int, expected: int
) -> None:
    made = await provisioner.create(create(required=required, limit=limit))
    assert made.capacity_bytes == expected


async def test_create_xfs_has_at_least_the_mkfs_minimum(provisioner: Provisioner) -> None:
    made = await provisioner.create(create(required=1, capability=mount("xfs")))
    assert made.capacity_bytes == 300 * MIB


@pytest.mark.parametrize(
    "request_",
    [create(limit=200 * MIB, capability=mount("xfs")), create(required=10**9 + 1, limit=10**9 + 1)],
    ids=["below xfs's minimum", "no multiple of a sector"],
)
async def test_create_without_a_possible_size_in_range_is_refused(
    provisioner: Provisioner, request_: Create
) -> None:
    with raised("VolumeSizeNotPossible"):
        await provisioner.create(request_)


@pytest.mark.parametrize(
    "other",
    [
        create(required=2 * GIB),
        create(limit=MIB * 512),
        create(capability=mount("xfs")),
        create(capability=mount(mode=Mode.SINGLE_NODE_WRITER)),
        create(sent={deferral_keys.DEFER: "always"}),
    ],
    ids=["larger", "smaller", "filesystem", "mode", "parameters"],
)
async def test_create_with_a_name_of_another_volume_is_a_conflict(
    provisioner: Provisioner, other: Create
) -> None:
    await provisioner.create(create(required=GIB))
    with pytest.raises(create_volume.VolumeExistsDifferently):
        await provisioner.create(other)


async def test_create_repeated_after_growth_returns_the_same_volume(
    state: Driver, provisioner: Provisioner
) -> None:
    first = await provisioner.create(create(required=GIB))
    driver_state.expand(state, first.volume_id, volumes.CapacityRange(2 * GIB), None)
    again = await provisioner.create(create(required=GIB))
    assert (again.volume_id, again.capacity_bytes) == (first.volume_id, 2 * GIB)


async def test_create_returns_only_its_parameters_as_volume_context(
    provisioner: Provisioner,
) -> None:
    sent = {
        class_parameters.FS_TYPE: "xfs",
        deferral_keys.DEFER: "always",
        deferral_keys.RUNTIME_HANDLER: "kata",
        "csi.storage.k8s.io/pvc/name": "claim",
    }
    made = await provisioner.create(create(capability=mount(""), sent=sent))
    context = class_parameters.volume_context(made.parameters)
    assert context == {deferral_keys.DEFER: "always", deferral_keys.RUNTIME_HANDLER: "kata"}
    assert made.capacity_bytes == GIB


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("crust.dev/defre", "always"),
        ("fsType", "ext4"),
        (deferral_keys.DEFER, "sometimes"),
        (class_parameters.FS_TYPE, "ntfs"),
        (deferral_keys.RUNTIME_HANDLER, ""),
    ],
)
async def test_create_with_unknown_parameter_is_refused(
    provisioner: Provisioner, state: Driver, key: str, value: str
) -> None:
    with pytest.raises(errors.InvalidRequest):
        await provisioner.create(create(sent={key: value}))
    assert list(state.stores.volume_records.index.page()) == []


@pytest.mark.parametrize(
    "capability",
    [
        mount("ntfs"),
        mount(mode=Mode.MULTI_NODE_MULTI_WRITER),
        mount("ext4", "bind"),
        mount("ext4", "password=x1y2"),
    ],
)
async def test_create_with_unsupported_capability_makes_nothing(
    provisioner: Provisioner, state: Driver, capability: volumes.VolumeCapability
) -> None:
    with pytest.raises(capability_check.CapabilityNotSupported) as caught:
        await provisioner.create(create(capability=capability))
    assert "x1y2" not in str(caught.value)
    assert list(state.stores.volume_records.index.page()) == []


@pytest.mark.parametrize("is_copy", [False, True])
@pytest.mark.parametrize("failure", [errors.Exhausted("no space left on device"), Killed()])
async def test_create_failed_or_killed_before_commit_leaves_no_volume(
    tmp_path: Path,
    state: Driver,
    provisioner: Provisioner,
    monkeypatch: pytest.MonkeyPatch,
    is_copy: bool,  # noqa: FBT001 - a parameter of the test
    failure: BaseException,
) -> None:
    """The name is free for other arguments: nobody was answered, and the name may be tried on another node then."""
    source = (await provisioner.create(create("source", required=64 * MIB))).volume_id
    request = create(required=64 * MIB)
    if is_copy:
        request = replace(request, source=SourceRequest("volume", source))

    def failing(*_: object) -> None:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(NewMemoryVolume, "commit", failing)
        with pytest.raises(type(failure)):
            await provisioner.create(request)
    volume_id = state.stores.pool.ids.volume_id("pvc-1")
    assert state.stores.volume_records.index.page() == (source,)
    assert state.stores.volume_records.find(volume_id) is None
    assert pool_layout.volume_records(tmp_path / "state") == {source}
    if isinstance(failure, errors.CrustError):
        assert state.stores.provisioning.image_ids() == {source}
        assert state.stores.provisioning.unsettled() == ()
    else:
        assert state.stores.provisioning.unsettled() == (volume_id,)
        state.stores.provisioning.settle(volume_id)
    made = await provisioner.create(create(required=96 * MIB, capability=block()))
    assert (made.volume_id, made.capacity_bytes) == (volume_id, 96 * MIB)


async def test_create_with_unconfirmed_commit_is_answered_by_the_retry(
    state: Driver, provisioner: Provisioner, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = NewMemoryVolume.commit

    def unconfirmed(self: NewMemoryVolume, records: Mapping[RecordKind, bytes]) -> None:
        commit(self, records)
        raise errors.PeerUnavailable("the answer was lost")

    with monkeypatch.context() as patch:
        patch.setattr(NewMemoryVolume, "commit", unconfirmed)
        with pytest.raises(errors.PeerUnavailable):
            await provisioner.create(create(required=64 * MIB))
    assert state.stores.volume_records.index.reserved_bytes() == 64 * MIB
    assert (await provisioner.create(create(required=64 * MIB))).capacity_bytes == 64 * MIB
    with pytest.raises(create_volume.VolumeExistsDifferently):
        await provisioner.create(create(required=96 * MIB))


async def test_create_over_an_orphan_image_is_refused(
    provisioner: Provisioner, state: Driver
) -> None:
    volume_id, backend = state.stores.pool.ids.volume_id("pvc-1"), state.stores.provisioning
    assert isinstance(backend, MemoryBackend)
    backend.images[volume_id] = MIB
    with raised("OrphanImage"):
        await provisioner.create(create())
    provisioner.delete(volume_id)
    assert backend.image_ids() == {volume_id}


async def test_volume_of_a_deleted_ones_name_is_new(
    provisioner: Provisioner, state: Driver
) -> None:
    made = await provisioner.create(create(required=GIB))
    known = state.stores.content_records.load(made.volume_id)
    state.stores.content_records.save(known.replaced(state="formatted", fs_type="ext4"))
    # a person has detached it
    staged = Staged(volume_id=made.volume_id, kind="mount", fs_type="ext4", paths=("/staging",))
    state.stores.node_state.note_staged(staged)
    provisioner.delete(made.volume_id)
    assert state.stores.node_state.staging_paths(made.volume_id) == ()
    with pytest.raises(models.VolumeNotFound):
        driver_state.expand(state, made.volume_id, volumes.CapacityRange(2 * GIB), None)
    await provisioner.create(create(required=64 * MIB))
    again = state.stores.volume_records.load(made.volume_id)
    assert again.capacity_bytes == 64 * MIB
    assert state.stores.content_records.load(made.volume_id).state == "new"


@pytest.mark.parametrize("lost", [pool_layout.volume_record, pool_layout.content_record])
async def test_volume_whose_record_was_lost_is_kept_and_reported(
    tmp_path: Path, state: Driver, provisioner: Provisioner, lost: Callable[[Path, str], Path]
) -> None:
    volume_id = (await provisioner.create(create())).volume_id
    lost(tmp_path / "state", volume_id).unlink()
    again = driver_state.opened(tmp_path, backend=cast("MemoryBackend", state.stores.provisioning))
    (finding,) = again.controller.health_check.examine(volume_id).findings
    kept = again.controller.provisioner
    if lost is pool_layout.content_record:
        assert finding.reason == "ContentRecordMissing"
        await kept.create(create())
        return
    assert finding.reason == "RecordMissing"
    with raised("OrphanImage"):
        await kept.create(create())
    kept.delete(volume_id)
    await again.collect_garbage()
    assert pool_layout.content_record(tmp_path / "state", volume_id).exists()


async def test_volume_with_unreadable_record_is_neither_created_nor_deleted(
    tmp_path: Path, state: Driver, provisioner: Provisioner
) -> None:
    volume_id = (await provisioner.create(create())).volume_id
    record = pool_layout.volume_record(tmp_path / "state", volume_id)
    record.write_text("{")
    with raised("RecordUnreadable"):
        await provisioner.create(create())
    with raised("RecordUnreadable"):
        provisioner.delete(volume_id)
    assert record.read_text() == "{"
    assert state.stores.provisioning.image_ids() == {volume_id}


async def test_clone_whose_source_content_changed_during_copy_is_not_used(
    state: Driver, provisioner: Provisioner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a copy of what a pod has written would be recorded as "new", and be formatted."""
    source = await provisioner.create(create("source"))
    wanted = replace(create("copy"), source=SourceRequest("volume", source.volume_id))
    contents, backend = state.stores.content_records, state.stores.provisioning

    clone = NewMemoryVolume.clone

    def cloned(self: NewMemoryVolume, of: volumes.VolumeId, **sizes: int) -> None:
        clone(self, of, **sizes)
        contents.save(contents.load(source.volume_id).replaced(in_guest=True))

    monkeypatch.setattr(NewMemoryVolume, "clone", cloned)
    monkeypatch.setattr(backend, "copies_at_once", lambda: True, raising=False)
    with pytest.raises(snapshot_sets.ContentChanged):
        await provisioner.create(wanted)
    copy_id = state.stores.pool.ids.volume_id("copy")
    assert state.stores.volume_records.find(copy_id) is None
    assert backend.image_ids() == {source.volume_id}


PLAIN: dict[str, str] = {}
GUEST = {deferral_keys.FORMAT_IN: "guest"}
LUKS = {deferral_keys.ENCRYPTION: "luks"}


@pytest.mark.parametrize("kind", ["volume", "snapshot"])
@pytest.mark.parametrize(
    ("of_source", "sent", "format_in"),
    [
        (PLAIN, PLAIN, "host"),
        (PLAIN, GUEST, "guest"),
        (PLAIN, LUKS, ""),
        (GUEST, PLAIN, ""),
        (GUEST, GUEST, "guest"),
        (GUEST, LUKS, ""),
        (GUEST, GUEST | LUKS, ""),
        (LUKS, PLAIN, ""),
        (LUKS, GUEST, ""),
        (LUKS, LUKS, "luks"),
        (LUKS, GUEST | LUKS, "luks"),
    ],
)
async def test_copy_keeps_the_protection_of_its_source_or_is_refused(
    state: Driver,
    provisioner: Provisioner,
    kind: Literal["volume", "snapshot"],
    of_source: dict[str, str],
    sent: dict[str, str],
    format_in: str,
) -> None:
    """A host would mount what guests wrote, or a guest would look for LUKS in plain bytes."""
    volume_id = (await provisioner.create(create("source", sent=of_source))).volume_id
    source: str = volume_id
    if kind == "snapshot":
        source = (await state.controller.snapshots.create("s", volume_id)).set_id
    wanted = replace(create("copy", sent=sent), source=SourceRequest(kind, source))
    if not format_in:
        with raised("SourceProtectionDiffers"):
            await provisioner.create(wanted)
        assert state.stores.volume_records.find(state.stores.pool.ids.volume_id("copy")) is None
        return
    copy = await provisioner.create(wanted)
    assert state.stores.content_records.load(copy.volume_id).format_in == format_in
    provisioner.delete(volume_id)
    assert await provisioner.create(wanted) == copy


async def test_create_writes_the_content_record_and_delete_removes_it(state: Driver) -> None:
    provisioner, known = state.controller.provisioner, state.stores.content_records
    made = await provisioner.create(create())
    written = known.load(made.volume_id)
    plain = ContentRecord(volume_id=made.volume_id, format_in="host", revision=1)
    assert written.encode() == plain.encode()
    again = await provisioner.create(create())
    assert (again, known.load(made.volume_id).revision) == (made, 1)
    provisioner.delete(made.volume_id)
    assert known.find(made.volume_id) is None


HERE = topology.segments({topology.KEY: driver_state.NODE})
ELSEWHERE = topology.segments({topology.KEY: "node-2"})


def test_get_capacity_depends_on_filesystem_and_topology(provisioner: Provisioner) -> None:
    def ask(
        capability: volumes.VolumeCapability | None = None, place: topology.Segments = ()
    ) -> tuple[int, int, int]:
        return provisioner.available((capability,) if capability else (), (), place)

    assert ask() == (POOL_BYTES, POOL_BYTES, MIB)
    assert ask(mount("xfs"), HERE) == (POOL_BYTES, POOL_BYTES, 300 * MIB)
    assert ask(mount(), ELSEWHERE) == (0, 0, 0)
    assert ask(mount(mode=Mode.MULTI_NODE_MULTI_WRITER)) == (0, 0, 0)
    with pytest.raises(errors.InvalidRequest):
        provisioner.available((), (("odd", ""),), ())
