"""Records and ledger: what comes back from the disk, and what is refused."""

import json
from pathlib import Path

import pytest

from crust import errors, volumes
from crust.blockdriver.node import node_state
from crust.blockdriver.node.node_state import NodeState, Published, Staged
from crust.blockdriver.records import volume_record, volume_records
from crust.blockdriver.records.pool import PoolIds
from crust.blockdriver.records.volume_record import Record
from crust.blockdriver.records.volume_records import VolumeRecords

BOOT = "11111111-2222-3333-4444-555555555555"
IDS = PoolIds("0123456789abcdef")
VOLUME = IDS.volume_id("pvc")


@pytest.fixture
def records(tmp_path: Path) -> VolumeRecords:
    made = VolumeRecords(str(tmp_path), IDS.is_volume_id)
    made.open()
    return made


def volume(**changes: object) -> Record:
    plain = Record(
        volume_id=VOLUME, name="pvc", phase="ready", capacity_bytes=1, parameters={}, usages=()
    )
    return plain.but(**changes)


def test_a_record_comes_back_as_it_was_saved(records: VolumeRecords) -> None:
    usage = volume_record.Usage(kind="mount", fs_type="ext4", mode=1)
    saved = records.save(volume(usages=(usage,), parameters={"a": "b"}, content="formatted"))
    assert records.load(VOLUME) == saved
    assert list(records.ids()) == [VOLUME]
    records.remove(VOLUME)
    assert records.find(VOLUME) is None


@pytest.mark.parametrize("phase", ["creating", "deleting"])
def test_a_volume_between_two_states_does_not_exist_for_users(
    records: VolumeRecords, phase: str
) -> None:
    records.save(volume(phase=phase))
    with pytest.raises(volume_records.VolumeNotFound):
        records.load(VOLUME)
    assert records.find(VOLUME) is not None


@pytest.mark.parametrize(
    "volume_id", ["", "../records/x", "vol-1", VOLUME + "0", VOLUME + "\n", IDS.snapshot_id("pvc")]
)
def test_an_id_that_is_none_of_ours_never_becomes_a_path(
    records: VolumeRecords, volume_id: str
) -> None:
    assert records.find(volumes.VolumeId(volume_id)) is None


def test_a_record_of_a_newer_schema_is_left_alone(records: VolumeRecords, tmp_path: Path) -> None:
    records.save(volume())
    path = tmp_path / f"{VOLUME}.json"
    newer = json.loads(path.read_text()) | {"schema": 2, "shiny": True}
    path.write_text(json.dumps(newer))
    with pytest.raises(volume_record.NewerVolumeRecord, match="schema 2"):
        records.load(VOLUME)


@pytest.mark.parametrize(
    "change",
    [
        {"capacity_bytes": -1},
        {"unknown": 1},
        {"content": "odd"},
        {"capacity_bytes": "1"},
        {"schema": None},
    ],
)
def test_a_record_that_is_not_ours_is_corrupt_and_stays(
    records: VolumeRecords, tmp_path: Path, change: dict[str, object]
) -> None:
    records.save(volume())
    path = tmp_path / f"{VOLUME}.json"
    text = json.dumps(json.loads(path.read_text()) | change)
    path.write_text(text)
    with pytest.raises(volume_record.UnreadableVolumeRecord):
        records.load(VOLUME)
    assert path.read_text() == text


def test_a_record_under_another_volumes_name_is_corrupt(
    records: VolumeRecords, tmp_path: Path
) -> None:
    records.save(volume())
    other = IDS.volume_id("other")
    (tmp_path / f"{VOLUME}.json").rename(tmp_path / f"{other}.json")
    with pytest.raises(volume_record.UnreadableVolumeRecord, match="describes"):
        records.load(other)


def entry(target: str = "/pods/a/mount") -> Published:
    return Published(
        volume_id=VOLUME,
        target=target,
        kind="mount",
        fs_type="ext4",
        mode=7,
        options=("noatime",),
        readonly=False,
        deferred=True,
        fingerprint="f" * 64,
        done=True,
    )


def opened(root: Path, boot: str = BOOT) -> NodeState:
    made = NodeState(str(root))
    made.open(boot)
    return made


def test_the_ledger_is_read_back_after_a_restart_and_void_after_a_reboot(tmp_path: Path) -> None:
    first = opened(tmp_path)
    staged = Staged(volume_id=VOLUME, kind="mount", fs_type="ext4", paths=("/staging",))
    first.note_staged(staged)
    first.note_published(entry())
    again = opened(tmp_path)
    assert again.staged(VOLUME) == staged
    assert again.published(volumes.TargetPath("/pods/a/mount")) == entry()
    assert again.published_of(VOLUME) == (entry(),)
    (tmp_path / "socket.lock").touch()
    (tmp_path / "something").mkdir()
    rebooted = opened(tmp_path, "99999999-2222-3333-4444-555555555555")
    assert rebooted.staged(VOLUME) is None
    assert rebooted.published_of(VOLUME) == ()
    assert not (tmp_path / BOOT).exists()
    assert (tmp_path / "socket.lock").exists()
    assert (tmp_path / "something").exists()


def test_what_the_first_version_of_the_ledger_wrote_is_read(tmp_path: Path) -> None:
    """An update comes in the middle of a boot: a field that is added later needs a default."""
    opened = NodeState(str(tmp_path))
    opened.open(BOOT)
    staged = f'{{"volume_id":"{VOLUME}","kind":"mount","fs_type":"ext4","paths":["/s"]}}'
    published = (
        f'{{"volume_id":"{VOLUME}","target":"/t","kind":"mount","fs_type":"ext4","mode":7,"options":["noatime"],'
        '"readonly":true,"deferred":false,"fingerprint":"d74d","done":true}'
    )
    (tmp_path / BOOT / "staged" / f"{VOLUME}.json").write_text(staged)
    target = volumes.TargetPath("/t")
    (tmp_path / BOOT / "published" / f"{target.digest}.json").write_text(published)
    for path in (tmp_path / BOOT).glob("*/*"):
        path.chmod(0o600)
    opened.open(BOOT)
    assert opened.staged(VOLUME) is not None
    assert opened.published(target) is not None


def test_forgetting_is_remembered(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.note_published(entry())
    first.note_published(entry("/pods/b/mount"))
    first.forget_published(volumes.TargetPath("/pods/a/mount"))
    first.forget_published(volumes.TargetPath("/pods/a/mount"))
    assert opened(tmp_path).published_of(VOLUME) == (entry("/pods/b/mount"),)


def test_a_damaged_entry_keeps_the_driver_from_serving_on_a_guess(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.note_published(entry())
    [path] = (tmp_path / BOOT / "published").iterdir()
    path.write_text("{")
    with pytest.raises(node_state.UnreadableEntry, match=path.name):
        opened(tmp_path)


def test_a_publish_that_could_not_be_forgotten_is_still_known_and_can_be_forgotten_again(
    tmp_path: Path,
) -> None:
    """Forgotten in memory alone it would be back after a restart, when no CO would ever unpublish it."""
    target = volumes.TargetPath("/pods/a/mount")
    entries = opened(tmp_path)
    entries.note_published(entry(target.text))
    file = next((tmp_path / BOOT / "published").iterdir())
    file.unlink()
    file.mkdir()  # unlink(2) fails, root or not
    with pytest.raises(errors.CrustError):
        entries.forget_published(target)
    assert entries.published(target) is not None
    file.rmdir()
    entries.forget_published(target)
    assert entries.published(target) is None
