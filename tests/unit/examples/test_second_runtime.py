"""The runtime without code of crust, clause by clause, on plain files."""

import json
import os
from pathlib import Path

import pytest

from examples import second_runtime
from examples.second_runtime import Refused


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "volumes"
    directory.mkdir(0o700)
    return directory


@pytest.fixture
def target(root: Path, tmp_path: Path) -> Path:
    """A target with an entry that a resolution finds."""
    path = tmp_path / "mount"
    path.mkdir()
    entry = root / second_runtime.digest(str(path))
    entry.mkdir(0o700)
    for name in ("mountInfo.json", "claim.lock"):
        (entry / name).touch(0o600)
    return path


def _entry(root: Path, target: Path) -> Path:
    entry = second_runtime.resolve(root, str(target))
    assert entry is not None
    return entry


@pytest.mark.spec("H-32")
def test_relative_source_is_refused_beside_a_directory_of_that_name(
    root: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(target.parent)
    with pytest.raises(Refused, match="relative"):
        second_runtime.resolve(root, target.name)
    assert second_runtime.resolve(root, str(root.parent / "other")) is None


def _parse(option: str) -> None:
    vectors = json.loads((Path(__file__).parents[3] / "specs/vectors/records.json").read_text())
    vector = next(it for it in vectors if it["name"] == "plain")
    record = {**json.loads(vector["text"]), "options": [option]}
    second_runtime.parse(json.dumps(record).encode(), vector["entry"])


@pytest.mark.spec("H-9")
@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("pass=0815", "0815"), ("keyfile=/x", "/x"), ("cred=0815", "0815"), ("Token", "None")),
        *(("src=nfs://u:p@h", "nfs"), ("source=http://u:@h", "http")),
    ],
)
def test_option_like_a_credential_is_refused_without_its_value(option: str, value: str) -> None:
    with pytest.raises(Refused, match=f"{option.partition('=')[0]} look like") as refused:
        _parse(option)
    assert value not in str(refused.value)


@pytest.mark.parametrize("option", ["noatime", "data=ordered", "src=nfs://u@h", "context=pass"])
def test_other_option_is_no_credential(option: str) -> None:
    _parse(option)


@pytest.mark.spec("H-4")
def test_root_and_entry_that_others_can_write_are_refused(root: Path, target: Path) -> None:
    entry = _entry(root, target)
    for directory in (entry, root):
        directory.chmod(0o720)
        with pytest.raises(Refused, match=f"{directory} can be written by others"):
            second_runtime.resolve(root, str(target))
        directory.chmod(0o700)
    assert _entry(root, target) == entry


@pytest.mark.spec("H-4")
def test_entry_that_is_a_link_is_refused(root: Path, target: Path) -> None:
    entry = _entry(root, target)
    entry.rename(root / "elsewhere")
    entry.symlink_to(root / "elsewhere")
    with pytest.raises(Refused, match="another kind of file"):
        second_runtime.resolve(root, str(target))


@pytest.mark.spec("H-4")
@pytest.mark.parametrize("fault", ["mode", "link", "pipe"])
def test_claim_lock_that_is_not_trusted_is_refused(root: Path, target: Path, fault: str) -> None:
    entry = _entry(root, target)
    lock = entry / "claim.lock"
    match fault:
        case "mode":
            lock.chmod(0o620)
        case "link":
            os.link(lock, root / "second")
        case "pipe":
            lock.unlink()
            os.mkfifo(lock, 0o600)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Refused, match=r"claim\.lock"):
        second_runtime.Lock(entry)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.spec("H-29")
@pytest.mark.parametrize(("box", "left"), [("box-1", False), ("box-2", True)])
def test_stopped_sandbox_removes_its_own_claim_alone(
    root: Path, target: Path, box: str, *, left: bool
) -> None:
    entry = _entry(root, target)
    second_runtime.Claim(entry, "box-1").write("mounted")
    lock = second_runtime.Lock(entry)
    if lock.is_of(box):
        lock.settle()
    lock.release()
    assert (entry / "claim.json").exists() is left
    assert not (entry / ".claim.dead").exists()


@pytest.mark.spec("H-24")
def test_claim_keeps_its_time_when_its_state_changes(root: Path, target: Path) -> None:
    entry = _entry(root, target)
    claim, written = second_runtime.Claim(entry, "box-1"), []
    for state, pid in (("claimed", os.getpid()), ("mounted", 4711)):
        claim.pid = pid
        claim.write(state)
        written.append(json.loads((entry / "claim.json").read_text()))
    assert [(it["state"], it["pid"]) for it in written] == [
        ("claimed", os.getpid()),
        ("mounted", 4711),
    ]
    assert written[0]["claimed_at"] == written[1]["claimed_at"]


def test_line_of_mountinfo_tells_of_filesystem_and_its_mount(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (
        rb"36 35 8:1 /a /mnt/with\040space ro,noatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro"
        b"\n"
    )
    monkeypatch.setattr(Path, "read_bytes", lambda _: text)
    assert list(second_runtime.mounts()) == [
        second_runtime.Mount("8:1", "/a", "/mnt/with space", "/dev/sda1", can_write=True)
    ]
