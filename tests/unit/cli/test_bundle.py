"""`crust bundle`: an archive of a node, without its secrets."""

import errno
import os
import tarfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from crust.cli import bundle
from tests.support.faults import lies
from tests.support.nodes.commands import invoked
from tests.support.nodes.examined_node import DEPLOY
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places

SECRETS = (
    "hunter2-planted",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJwbGFudGVkIn0.c2lnbmF0dXJl",
    "planted-bearer-1",
)

LEAKS = (
    'password = "hunter2-planted"',
    "mount.cifs: options username=a,password=hunter2-planted",
    '{"passphrase": "hunter2-planted"}',
    "Authorization: Bearer planted-bearer-1",
    "token eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJwbGFudGVkIn0.c2lnbmF0dXJl of the service account",
    "https://admin:hunter2-planted@api.example.com/",
    "program --api-token hunter2-planted",
)  # fmt: skip


@pytest.fixture
def leaking(root: Path) -> bundle.NodeFiles:
    """A node that leaks wherever it can."""
    text = "\n".join(LEAKS)
    for name in ("etc/proxy.toml", "state/volumes/p-1/volume.json"):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    os.mkfifo(root / "etc" / "pipe.toml")
    journal = root / "journal"
    journal.write_text("#!/bin/sh\ncat <<'END'\n" + text + "\nEND\n")
    journal.chmod(0o755)
    return bundle.NodeFiles(str(root / "run"), str(root / "state"), str(root / "etc"), str(journal))


def contents(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as file:
        files = [(member.name, file.extractfile(member)) for member in file]
        return {name.partition("/")[2]: content.read() for name, content in files if content}


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz"])
async def test_archive_has_all_parts_and_no_secret(
    root: Path, leaking: bundle.NodeFiles, name: str
) -> None:
    count = await bundle.write(root / name, bundle.parts(leaking))
    archived = contents(root / name)
    assert len(archived) == count
    assert {
        "doctor.json", "versions.txt", "journal.txt", "settings/proxy.toml",
        "pool/volumes/p-1/volume.json", "kernel/proc/self/mountinfo",
    } <= set(archived)  # fmt: skip
    assert b"does not answer" in archived["missing.txt"]
    assert b"pipe.toml is no regular file" in archived["missing.txt"]
    assert b"***" in archived["journal.txt"]
    for text in archived.values():
        assert not [secret for secret in SECRETS if secret.encode() in text]
    assert (root / name).stat().st_mode & 0o777 == 0o600


def test_journal_is_of_every_unit_that_is_shipped() -> None:
    shipped = {path.stem for path in (DEPLOY / "systemd").iterdir()}
    assert {unit.removesuffix("*") for unit in bundle._UNITS} == shipped


async def test_archive_of_a_node_has_its_entries_and_status(root: Path, places: Places) -> None:
    async with FakeNode(places) as node, node.handler():
        await node.co.publish("vol-1", places.target("one"))
        files = bundle.NodeFiles(places.run, f"{root}/state")
        await bundle.write(root / "a.tar.gz", bundle.parts(files))
    archived = contents(root / "a.tar.gz")
    assert b'"volume_id": "vol-1"' in archived["status.json"]
    assert any(name.startswith("handoff/") for name in archived)


async def test_archive_has_every_pool_that_the_settings_name(
    root: Path, leaking: bundle.NodeFiles
) -> None:
    for name in ("state", "fast", "slow"):
        for file in ("pool.json", "volumes/v/content.json", "snapshots/s/set.json"):
            path = root / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
    (root / "etc" / "driver.toml").write_text(
        f'state_dir = "{root}/state"\npools.fast.state_dir = "{root}/fast"\n'
    )
    (root / "etc" / "node.toml").write_text(f'[[drivers]]\nstate_dir = "{root}/slow"\n')
    node_state = root / "run" / "driver" / "pools" / "fast" / "boot" / "v.json"
    node_state.parent.mkdir(parents=True)
    node_state.write_text("{}")
    await bundle.write(root / "a.tar.gz", bundle.parts(leaking))
    archived = contents(root / "a.tar.gz")
    for into in ("pool", f"pools{root}/fast", f"pools{root}/slow"):
        assert {f"{into}/pool.json", f"{into}/volumes/v/content.json"} <= set(archived)
        assert f"{into}/snapshots/s/set.json" in archived
    assert not any(name.startswith(f"pools{root}/state") for name in archived)
    assert "node-state/pools/fast/boot/v.json" in archived
    assert b"the pools that" in archived["missing.txt"], "proxy.toml is no TOML"


async def test_directory_that_cannot_be_listed_is_named_as_missing(
    root: Path, leaking: bundle.NodeFiles
) -> None:
    volume = lies.Concerns(frozenset({f"{leaking.state_dir}/volumes/p-1"}), ())
    with lies.failing(volume, lies.Failure(0, errno.EACCES)):
        await bundle.write(root / "a.tar.gz", bundle.parts(leaking))
    assert b"volumes/p-1: Permission denied" in contents(root / "a.tar.gz")["missing.txt"]


@pytest.mark.parametrize(
    ("name", "code", "why"), [("a.tar.gz", 1, "File exists"), ("a.zip", 2, "[UnknownArchive]")]
)
async def test_file_that_exists_or_has_another_ending_is_not_touched(
    root: Path, name: str, code: int, why: str
) -> None:
    (root / name).write_text("mine")
    result = await invoked("bundle", str(root / name), "--run-dir", f"{root}/run")
    assert (result.exit_code, why in result.output) == (code, True), result.output
    assert (root / name).read_text() == "mine"


async def test_unfinished_archive_is_removed(root: Path) -> None:
    async def interrupted() -> AsyncIterator[tuple[str, bytes]]:
        yield "one", b"1"
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        await bundle.write(root / "a.tar.gz", interrupted())
    assert not (root / "a.tar.gz").exists()


async def test_end_of_a_long_file_is_kept(
    root: Path, leaking: bundle.NodeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "LIMIT_BYTES", 8)
    (root / "etc" / "proxy.toml").write_text("password=hunter2\nabc\n")
    (root / "etc" / "node.toml").write_text("abc\n")
    await bundle.write(root / "a.tar.gz", bundle.parts(leaking))
    archived = contents(root / "a.tar.gz")
    assert archived["settings/proxy.toml"] == archived["settings/node.toml"] == b"abc\n"


async def test_bundle_of_disk_that_hangs_ends_and_names_its_files(
    root: Path, leaking: bundle.NodeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "READ_S", 0.2)
    real, released = bundle._end_of, threading.Event()

    def read(path: Path) -> bytes:
        if path.name == "volume.json":
            released.wait(60)
        return real(path)

    monkeypatch.setattr(bundle, "_end_of", read)
    try:
        await bundle.write(root / "a.tar.gz", bundle.parts(leaking))
    finally:
        released.set()
    assert b"volume.json: [SystemCallTimedOut]" in contents(root / "a.tar.gz")["missing.txt"]
