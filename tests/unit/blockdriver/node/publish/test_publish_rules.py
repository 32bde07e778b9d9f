"""The second-publish table of the CSI specification, cell by cell; the rule of deferral; the node state on disk."""

import errno
import json
import os
from functools import partial
from pathlib import Path

import pytest

from crust.blockdriver.engines.pool_access import PoolIds
from crust.blockdriver.node.publish import publish_rules
from crust.blockdriver.node.publish.publish_rules import Publish
from crust.blockdriver.records.node_state import NodeState, Published, Staged
from crust.core import errors, volumes
from tests.support.drivers import driver_state
from tests.support.drivers.block_driver import Mode, block, mount
from tests.support.drivers.memory_backend import MemoryBackend
from tests.support.raised import raised

SHARED = {
    Mode.MULTI_NODE_READER_ONLY,
    Mode.MULTI_NODE_SINGLE_WRITER,
    Mode.MULTI_NODE_MULTI_WRITER,
    Mode.SINGLE_NODE_MULTI_WRITER,
}


def publish(
    target: str = "/pods/a/mount",
    capability: volumes.VolumeCapability | None = None,
    *,
    readonly: bool = False,
    deferred: bool = False,
    context: dict[str, str] | None = None,
) -> Publish:
    return Publish(
        volume_id=volumes.VolumeId("vol-1"),
        target=volumes.TargetPath.parse(target),
        staging=volumes.TargetPath.parse("/staging/vol-1"),
        capability=capability or mount(),
        readonly=readonly,
        deferred=deferred,
        volume_context=tuple((context or {}).items()),
    )


def recorded(request: Publish) -> Published:
    return publish_rules.entry_of(request, "ext4")


@pytest.mark.parametrize("mode", list(Mode))
def test_publish_another_target_depends_on_the_access_mode(mode: Mode) -> None:
    present = recorded(publish("/pods/a/mount", mount(mode=mode)))
    wanted = recorded(publish("/pods/b/mount", mount(mode=mode)))
    if mode in SHARED:
        publish_rules.check_other_targets([present], wanted)
        return
    with raised("PublishedElsewhere", match="/pods/a/mount"):
        publish_rules.check_other_targets([present], wanted)


@pytest.mark.parametrize(
    "other",
    [block(), mount("xfs"), mount("ext4", "noatime"), mount(mode=Mode.MULTI_NODE_MULTI_WRITER)],
    ids=["access type", "filesystem", "options", "mode"],
)
def test_second_target_with_another_capability_is_refused(other: volumes.VolumeCapability) -> None:
    present = publish_rules.entry_of(publish("/pods/a/mount", other), "xfs")
    if isinstance(other.access, volumes.MountAccess):
        present = publish_rules.entry_of(publish("/pods/a/mount", other), other.access.fs_type)
    with raised("PublishedElsewhere"):
        publish_rules.check_other_targets([present], recorded(publish("/pods/b/mount")))


@pytest.mark.parametrize("present_deferred", [False, True])
@pytest.mark.parametrize("wanted_deferred", [False, True])
@pytest.mark.parametrize("present_readonly", [False, True])
@pytest.mark.parametrize("wanted_readonly", [False, True])
def test_publish_host_and_guest_share_only_read_only(
    *, present_deferred: bool, wanted_deferred: bool, present_readonly: bool, wanted_readonly: bool
) -> None:
    present = recorded(publish(readonly=present_readonly, deferred=present_deferred))
    wanted = recorded(publish("/pods/b/mount", readonly=wanted_readonly, deferred=wanted_deferred))
    kernels_differ = present_deferred or wanted_deferred
    if kernels_differ and not (present_readonly and wanted_readonly):
        with raised("PublishedElsewhere"):
            publish_rules.check_other_targets([present], wanted)
    else:
        publish_rules.check_other_targets([present], wanted)


def test_fingerprint_ignores_pod_names_and_tokens() -> None:
    first = publish(context={"csi.storage.k8s.io/pod.name": "a", "crust.dev/defer": "always"})
    again = publish(
        context={
            "csi.storage.k8s.io/pod.name": "b",
            "csi.storage.k8s.io/serviceAccount.tokens": "fresh",
            "crust.dev/defer": "always",
        }
    )
    other = publish(context={"crust.dev/defer": "never"})
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    "request_",
    [
        publish(readonly=True),
        publish(capability=mount("ext4", "ro")),
        publish(capability=mount(mode=Mode.SINGLE_NODE_READER_ONLY)),
    ],
    ids=["flag", "mount option", "access mode"],
)
def test_publish_read_only_has_three_forms(request_: Publish) -> None:
    assert recorded(request_).readonly


def test_entry_holds_no_host_option_and_no_credential() -> None:
    request = publish(capability=mount("ext4", "noatime", "_netdev", "rw"), deferred=True)
    assert recorded(request).options == ("noatime",)
    secret = publish(capability=mount("ext4", "password=x1y2"))
    with raised("CredentialInOptions"):
        recorded(secret)
    assert "x1y2" not in repr(secret)


def test_fingerprint_is_stable_across_driver_versions() -> None:
    """A kubelet publishes again whenever tokens change; what an earlier version wrote down must be equal then."""
    group = volumes.GroupChange(2000)
    context = {"crust.dev/defer": "never", "csi.storage.k8s.io/pod.uid": "u"}
    filesystem = publish(
        capability=mount("xfs", "noatime", group=group), readonly=True, context=context
    )
    expected = "d74d2a9bd486dd2e2cc1d1b8a2648a72e347f06820112a8e56171a87728b0e1a"
    assert filesystem.fingerprint == expected
    expected = "136a1501b2634a0eeeb36b6051b0c2cd304a0d8b925bf5119ebca16f102a2b7e"
    assert publish(capability=block()).fingerprint == expected


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
