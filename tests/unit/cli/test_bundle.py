"""`crust bundle`: what is in the archive, that no secret is, and that it is written atomically."""

import asyncio
import os
import tarfile
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from crust.cli import bundle, main
from tests.support.nodes import node as nodes
from tests.support.nodes.node import Places

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
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="crust-") as path:
        yield Path(path)


@pytest.fixture
def places(root: Path) -> bundle.NodeFiles:
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
        return {name.partition("/")[2]: each.read() for name, each in files if each}


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz"])
async def test_archive_has_all_parts_and_no_secret(
    root: Path, places: bundle.NodeFiles, name: str
) -> None:
    count = await bundle.write(root / name, bundle.parts(places))
    found = contents(root / name)
    assert len(found) == count
    assert {
        "doctor.json", "versions.txt", "journal.txt", "settings/proxy.toml",
        "pool/volumes/p-1/volume.json", "kernel/proc/self/mountinfo",
    } <= set(found)  # fmt: skip
    assert b"does not answer" in found["missing.txt"]
    assert b"***" in found["journal.txt"]
    for text in found.values():
        assert not [each for each in SECRETS if each.encode() in text]
    assert (root / name).stat().st_mode & 0o777 == 0o600


async def test_archive_of_a_node_has_its_entries_and_status(root: Path) -> None:
    node_places = Places.make(str(root))
    async with nodes.running(node_places) as node, node.handler():
        await node.co.publish("vol-1", node_places.target("one"))
        await bundle.write(
            root / "a.tar.gz", bundle.parts(bundle.NodeFiles(node_places.run, f"{root}/state"))
        )
    found = contents(root / "a.tar.gz")
    assert b'"volume_id": "vol-1"' in found["status.json"]
    assert any(name.startswith("handoff/") for name in found)


async def test_file_that_exists_is_not_touched(root: Path, places: bundle.NodeFiles) -> None:
    (root / "a.tar.gz").write_text("mine")
    words = ["bundle", str(root / "a.tar.gz"), "--run-dir", places.run_dir]
    result = await asyncio.to_thread(CliRunner().invoke, main.main, words)
    assert result.exit_code == 1
    assert "File exists" in result.output
    assert (root / "a.tar.gz").read_text() == "mine"


async def test_unknown_kind_of_archive_is_wrong_usage(root: Path) -> None:
    words = ["bundle", str(root / "a.zip")]
    result = await asyncio.to_thread(CliRunner().invoke, main.main, words)
    assert result.exit_code == 2
    assert not (root / "a.zip").exists()


async def test_unfinished_archive_is_removed(root: Path) -> None:
    async def interrupted() -> AsyncIterator[tuple[str, bytes]]:
        yield "one", b"1"
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        await bundle.write(root / "a.tar.gz", interrupted())
    assert not (root / "a.tar.gz").exists()


async def test_end_of_a_long_file_is_kept(
    root: Path, places: bundle.NodeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "LIMIT_BYTES", 8)
    (root / "etc" / "proxy.toml").write_text("password=hunter2\nabc\n")
    (root / "etc" / "node.toml").write_text("abc\n")
    await bundle.write(root / "a.tar.gz", bundle.parts(places))
    found = contents(root / "a.tar.gz")
    assert found["settings/proxy.toml"] == found["settings/node.toml"] == b"abc\n"


async def test_bundle_of_a_disk_that_hangs_ends_and_names_its_files(
    root: Path, places: bundle.NodeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "READ_S", 0.2)
    real, released = bundle._end_of, threading.Event()

    def read(path: Path) -> bytes:
        if path.name == "volume.json":
            released.wait(60)
        return real(path)

    monkeypatch.setattr(bundle, "_end_of", read)
    try:
        await bundle.write(root / "a.tar.gz", bundle.parts(places))
    finally:
        released.set()
    assert b"volume.json: [SystemCallTimedOut]" in contents(root / "a.tar.gz")["missing.txt"]


async def test_bundle_pipe_in_a_files_place_is_named_and_does_not_hang(
    root: Path, places: bundle.NodeFiles
) -> None:
    await bundle.write(root / "a.tar.gz", bundle.parts(places))
    assert b"pipe.toml is no regular file" in contents(root / "a.tar.gz")["missing.txt"]
