"""One of each file that crust keeps, with every field set, as today's code writes them.

python -m tests.support.records.stored_records DIRECTORY

pool/            the block driver's pool: pool.json, volumes, snapshots
pool.pool-id     the id of the pool that the node serves
run/<boot id>/   its node state
run/freezes/     its freeze intents, on the host and in a guest
handoff/         an entry of the handoff directory, with a claim
"""

import datetime
import sys
from dataclasses import replace
from pathlib import Path
from typing import TypeVar
from unittest import mock

from crust.blockdriver.engines.files import engine
from crust.blockdriver.engines.files.records import FileRecords, Reserve
from crust.blockdriver.engines.pool_store import RecordKind
from crust.blockdriver.node.node_state import NodeState, Published, Staged
from crust.blockdriver.records.models import (
    Attached,
    ContentRecord,
    ContentSource,
    Limits,
    Snapshot,
    SnapshotSet,
    StoredRecord,
    Usage,
    VolumeRecord,
)
from crust.blockdriver.records.records import IndexedRecords, Records
from crust.blockdriver.snapshots.freeze_intents import Intent, Intents
from crust.core import volumes
from crust.core.pool_ids import PoolIds
from crust.handoff import claims
from crust.handoff.store import Store
from crust.host.process import sysfs
from tests.support.records.records import PUBLISHED_AT, TARGET, a_record

BOOT = "11111111-2222-3333-4444-555555555555"
IDS = PoolIds("0123456789abcdef")
VOLUME = IDS.volume_id("pvc-1")
IN_GUEST = IDS.volume_id("pvc-2")
SNAPSHOT = IDS.member_id("group-1", VOLUME)
GROUP = IDS.group_id("group-1")
_UUID = "11111111-0000-4000-8000-000000000000"
_MOUNTED = Usage(kind="mount", fs_type="ext4", mode=7)
_LIMITS = volumes.IoLimits(100, 200, 1 << 20, 2 << 20)
_CREATED_NS = 1770091506000000000

RECORD = replace(
    a_record(
        readonly=True,
        io_limits=_LIMITS,
        format=volumes.GuestFormat(ext4_bytes_per_inode=16384, ext4_reserved_percent=5),
        encryption=volumes.Encryption.LUKS,
    ),
    decided_by="the volume context says crust.dev/defer: always",
)


M = TypeVar("M", bound=StoredRecord)

INTENTS = {
    VOLUME: Intent(VOLUME, identity=str(volumes.DeviceIdentity(7, 3, 42))),
    IN_GUEST: Intent(IN_GUEST, target=TARGET.text),
}


def file_records(directory: Path, reserve: Path | None = None) -> FileRecords:
    """A store of records in a directory of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    kept = Reserve(reserve or Path(f"{directory}.reserve"))
    return FileRecords(directory, "record.json", kept, limit_bytes=16 * 1024 * 1024)


def place_of(records: Records[M], record_id: str) -> Path:
    """The file of a record."""
    return Path(records._store.shown(record_id))


def made(records: Records[M], record: M) -> M:
    """Write a record as an engine does, which makes it with what it describes."""
    path, written = place_of(records, record.id), record.as_written()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(written.encode())
    path.chmod(0o600)
    if isinstance(records, IndexedRecords):
        records.index.put(record.id, written.summary)
    return written.note_stored(written.encode())


def removed(records: Records[M], record_id: str) -> None:
    """Remove a record as an engine does."""
    place_of(records, record_id).unlink()
    if isinstance(records, IndexedRecords):
        records.index.drop(record_id)


class Stores:
    """What reads and writes the records below a directory."""

    def __init__(self, root: Path) -> None:
        self.engine = engine(str(root / "pool"), create=True)
        self.pool, records = self.engine.home, self.engine.records
        self.volumes = IndexedRecords(records(RecordKind.VOLUMES), VolumeRecord, IDS.is_volume_id)
        self.contents = Records(records(RecordKind.CONTENT), ContentRecord, IDS.is_volume_id)
        self.sets = IndexedRecords(records(RecordKind.SNAPSHOTS), SnapshotSet, IDS.is_set_id)
        self.node = NodeState(str(root / "run"), self.engine.access)
        self.intents = Intents(str(root / "run"))
        self.handoff = Store(str(root / "handoff"))

    def open(self) -> None:
        """Read what is there, as a start does."""
        self.pool.open()
        for each in (self.volumes, self.sets):
            each.open()
        self.node.open(BOOT)
        self.handoff.open()


def write(root: Path) -> None:
    """Write one of each below `root`."""
    stores = Stores(root)
    with (
        mock.patch(
            "crust.blockdriver.engines.files.pool.secrets.token_hex", return_value=IDS.pool_id
        ),
        mock.patch("crust.blockdriver.engines.files.pool.datetime.datetime", _Then),
    ):
        stores.open()
    _write_volume(stores)
    _write_snapshots(stores)
    _write_node_state(stores.node)
    _write_intents(stores.intents)
    entry = stores.handoff.write(RECORD)
    claim = claims.Claim(
        "sandbox-1", "kata", claims.State.ERROR, "no such disk", 42, PUBLISHED_AT, live=False
    )
    claims.write(stores.handoff.layout.entry(entry.require().target), claim)


class _Then(datetime.datetime):
    @classmethod
    def now(cls, _zone: datetime.tzinfo | None = None) -> "_Then":
        return cls(2026, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)


def _write_volume(stores: Stores) -> None:
    source = ContentSource(kind="snapshot", id=SNAPSHOT, size_bytes=1 << 26, fs_type="ext4")
    record = VolumeRecord(
        volume_id=VOLUME,
        name="pvc-1",
        capacity_bytes=1 << 26,
        parameters={"fsType": "ext4"},
        usages=(_MOUNTED,),
        content_source=source,
        nodes=(Attached(node_id="node-1", usage=_MOUNTED, readonly=False),),
        limits=Limits.of(_LIMITS),
        limits_before=Limits(),
    )
    content = ContentRecord(
        volume_id=VOLUME,
        revision=1,
        state="formatting",
        fs_type="ext4",
        planned_uuid=_UUID,
        filled_bytes=1 << 25,
        growth_refused="the filesystem needs a check",
        generation=3,
        in_guest=True,
    )
    made = {RecordKind.VOLUMES: record.encode(), RecordKind.CONTENT: content.encode()}
    with stores.engine.provisioning.making(VOLUME) as making:
        making.create(1 << 26)
        making.commit(made)


def _write_snapshots(stores: Stores) -> None:
    snapshot = Snapshot(
        snapshot_id=SNAPSHOT,
        source_volume_id=VOLUME,
        size_bytes=1 << 26,
        state="formatted",
        fs_type="ext4",
        planned_uuid=_UUID,
        filled_bytes=1 << 26,
        in_guest=True,
    )
    made(
        stores.sets,
        SnapshotSet(set_id=GROUP, name="group-1", created_ns=_CREATED_NS, snapshots=(snapshot,)),
    )


def _write_node_state(node: NodeState) -> None:
    node.note_staged(
        Staged(volume_id=VOLUME, kind="mount", fs_type="ext4", paths=("/staging",), host="prepared")
    )
    node.note_published(
        Published(
            volume_id=VOLUME,
            target=TARGET.text,
            kind="mount",
            fs_type="ext4",
            mode=7,
            options=("noatime",),
            readonly=True,
            deferred=True,
            fingerprint="f" * 64,
            done=True,
        )
    )


def read_intents(intents: Intents) -> dict[volumes.VolumeId, Intent]:
    """The intents of the boot that the files name, by volume."""
    with mock.patch.object(sysfs, "boot_id", return_value=BOOT):
        return {each.volume_id: each for each in intents.open()}


def _write_intents(intents: Intents) -> None:
    read_intents(intents)
    with mock.patch.object(sysfs, "boot_id", return_value=BOOT):
        for each in INTENTS.values():
            intents.note(each)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
