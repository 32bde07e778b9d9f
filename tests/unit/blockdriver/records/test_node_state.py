"""The node state on disk, and the slots of a node."""

import errno
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from crust.blockdriver.engines.pool_access import PoolIds
from crust.blockdriver.records.node_state import AttachSlots, NodeState, Published, Staged
from crust.core import errors, volumes
from tests.support.drivers import driver_state
from tests.support.drivers.driver_state import NODE
from tests.support.drivers.memory_backend import MemoryBackend

BOOT = "11111111-2222-3333-4444-555555555555"
IDS = PoolIds("0123456789abcdef")
VOLUME = IDS.volume_id("pvc")


def entry(target: str = "/pods/a/mount") -> Published:
    return driver_state.published(VOLUME, target, options=("noatime",), fingerprint="f" * 64)


def staged_at(path: str, volume_id: volumes.VolumeId = VOLUME) -> Staged:
    return Staged(volume_id=volume_id, kind="mount", fs_type="ext4", paths=(path,))


def opened(root: Path, boot: str = BOOT) -> NodeState:
    made = NodeState(str(root), MemoryBackend())
    made.open(boot)
    return made


def test_node_state_survives_restart_and_is_empty_after_reboot(tmp_path: Path) -> None:
    first = opened(tmp_path)
    staged = staged_at("/staging")
    first.note_staged(staged)
    first.note_published(entry())
    again = opened(tmp_path)
    assert again.of(VOLUME).stage == staged
    assert again.published(volumes.TargetPath("/pods/a/mount")) == entry()
    assert again.of(VOLUME).publishes == (entry(),)
    (tmp_path / "socket.lock").touch()
    (tmp_path / "something").mkdir()
    rebooted = opened(tmp_path, "99999999-2222-3333-4444-555555555555")
    assert rebooted.of(VOLUME).stage is None
    assert rebooted.of(VOLUME).publishes == ()
    assert not (tmp_path / BOOT).exists()
    assert (tmp_path / "socket.lock").exists()
    assert (tmp_path / "something").exists()


def test_start_goes_on_if_another_boots_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened(tmp_path).note_published(entry())

    def failing(path: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", failing)
        rebooted = opened(tmp_path, "99999999-2222-3333-4444-555555555555")
    assert rebooted.of(VOLUME).publishes == ()
    assert "another boot stays" in caplog.text
    opened(tmp_path, "99999999-2222-3333-4444-555555555555")
    assert not (tmp_path / BOOT).exists()


def test_node_state_forget_survives_a_restart(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.note_published(entry())
    first.note_published(entry("/pods/b/mount"))
    first.forget_published(VOLUME, volumes.TargetPath("/pods/a/mount"))
    first.forget_published(VOLUME, volumes.TargetPath("/pods/a/mount"))
    assert opened(tmp_path).of(VOLUME).publishes == (entry("/pods/b/mount"),)


def test_published_of_two_volumes_is_the_one_noted_last(tmp_path: Path) -> None:
    state, target, other = opened(tmp_path), volumes.TargetPath("/pods/a/mount"), IDS.volume_id("a")
    later = entry().model_copy(update={"volume_id": other})
    for noted in (entry(), later, entry()):
        state.note_published(noted)
        assert state.published(target) == noted
    state.forget_published(VOLUME, target)
    assert state.published(target) == later


@pytest.mark.parametrize(
    ("left", "why"),
    [
        (f'{{"stage":{{"volume_id":"{VOLUME}"', "not JSON"),
        ("", "not JSON"),
        ("[]", "not JSON"),
        ("a directory", "not a regular file"),
        ('{"stage":null,"publishes":[]}', "not JSON with a schema number"),
        ('{"schema":0,"stage":null,"publishes":[]}', "schema 0"),
        ('{"schema":2,"stage":null,"publishes":[]}', "schema 2"),
        ('{"schema":1,"stage":{},"publishes":[]}', "stage.volume_id: Field required"),
    ],
)
def test_damaged_file_blocks_its_volume_alone_until_it_is_unstaged(
    tmp_path: Path, left: str, why: str
) -> None:
    target, other = volumes.TargetPath("/pods/a/mount"), IDS.volume_id("other")
    staged = staged_at("/s", other)
    elsewhere = entry("/pods/b/mount").model_copy(update={"volume_id": other})
    first = opened(tmp_path)
    first.note_staged(staged.model_copy(update={"volume_id": VOLUME}))
    first.note_published(entry())
    [path] = (tmp_path / BOOT).iterdir()
    first.note_staged(staged)
    first.note_published(elsewhere)
    path.write_text(left)
    if left == "a directory":
        path.unlink()
        path.mkdir()

    again = opened(tmp_path)
    for call in (again.of, again.live_publishes):
        with pytest.raises(errors.Corrupt, match=f"node state entry .*{path.name}.*{why}"):
            call(VOLUME)
    with pytest.raises(errors.Corrupt, match=f"node state entry .*{path.name}"):
        again.note_published(entry())
    assert (again.unreadable(VOLUME), again.unreadable(other)) == (str(path), "")
    assert again.staging_paths(VOLUME) == (str(path),)
    assert (again.of(other).stage, again.of(other).publishes) == (staged, (elsewhere,))
    assert again.published(volumes.TargetPath(elsewhere.target)) == elsewhere
    if left != "a directory":
        again.forget_staged(VOLUME)
        assert (again.of(VOLUME).stage, again.unreadable(VOLUME)) == (None, "")
        assert (again.published(target), again.of(VOLUME).publishes) == (None, ())
        assert not path.exists()


@pytest.mark.parametrize("kind", ["publish", "stage"])
def test_node_state_forget_that_failed_can_be_repeated(tmp_path: Path, kind: str) -> None:
    """Forgotten in memory alone it would be back after a restart, when no CO would ever end it."""
    state, target = opened(tmp_path), volumes.TargetPath("/pods/a/mount")
    if kind == "publish":
        state.note_published(entry(target.text))
        forget = partial(state.forget_published, VOLUME, target)
    else:
        state.note_staged(staged_at("/staging"))
        forget = partial(state.forget_staged, VOLUME)
    file = next((tmp_path / BOOT).iterdir())
    file.unlink()
    file.mkdir()  # unlink(2) fails, root or not
    with pytest.raises(errors.CrustError):
        forget()
    assert state.of(VOLUME).publishes or state.of(VOLUME).stage
    file.rmdir()
    forget()
    assert not state.of(VOLUME).publishes
    assert state.of(VOLUME).stage is None


def test_node_state_of_later_version_is_kept_by_rewrite(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.note_staged(staged_at("/staging"))
    first.note_published(entry())
    [path] = (tmp_path / BOOT).iterdir()
    later = json.loads(path.read_text().replace('"kind"', '"later":1,"kind"'))
    path.write_text(json.dumps(later | {"later": 1}))
    (path.parent / "note~").write_text("an editor's")
    again = opened(tmp_path)
    published, staged = again.published(volumes.TargetPath("/pods/a/mount")), again.of(VOLUME).stage
    assert published is not None
    assert staged is not None
    assert published.fingerprint == entry().fingerprint
    again.note_published(published.model_copy(update={"done": False}))
    again.note_staged(staged.model_copy(update={"paths": ("/other",)}))
    assert path.read_text().count('"later":1') == 3


class _Between:
    """An index or engine in which something happens between two questions."""

    def __init__(self) -> None:
        self.on: set[volumes.VolumeId] = set()
        self.here: set[volumes.VolumeId] = set()
        self.then: Callable[[], object] = lambda: None

    def on_node(self, _: str) -> frozenset[volumes.VolumeId]:
        answer = frozenset(self.on)
        self.then()
        return answer

    def attached_here(self) -> tuple[volumes.VolumeId, ...]:
        return tuple(self.here)


@pytest.mark.spec("N-7")
def test_slots_hold_a_publish_that_ends_between_the_questions() -> None:
    """The record is saved after the index was read, and the publish ends before anybody asks what is on its way."""
    between, volume_id = _Between(), volumes.VolumeId("v")
    slots = AttachSlots(NODE, 3)
    slots.pools.append((between, between))  # type: ignore[arg-type]
    publish = slots.taking(volume_id)
    publish.__enter__()
    between.then = lambda: between.on.add(volume_id)
    assert slots.in_use(NODE)[1] == (volume_id,)
    between.then = lambda: None
    publish.__exit__(None, None, None)
    assert slots.in_use(NODE)[1] == (volume_id,)
