"""Commands that ask no daemon: what they print, and what they import."""

import datetime
import json
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from crust.cli import bundle, explain, main
from crust.inspection import output, views
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places
from tests.unit.cli.conftest import invoked

NOW = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class Thing:
    name: str
    note: str
    since: datetime.datetime


COLUMNS = (
    output.Column("name", lambda row: row.name, styles={"bad": output.BAD}),
    output.Column("note", lambda row: row.note, wide=True),
)


@pytest.mark.parametrize(
    ("rows", "wide", "lines"),
    [
        (
            [Thing("n" * 300, "", NOW), Thing("é", "x", NOW)],  # neither cut nor wrapped
            True,
            [f"NAME{' ' * 298}NOTE", f"{'n' * 300}  -", f"é{' ' * 301}x"],
        ),
        ([Thing("a", "b", NOW)], False, ["NAME", "a"]),
        ([Thing("a\x1b[31m\nb", "", NOW)], False, ["NAME", "a\\x1b[31m\\nb"]),
    ],
    ids=["long", "narrow", "control-characters"],
)
def test_table_has_a_line_for_each_row(rows: list[Thing], *, wide: bool, lines: list[str]) -> None:
    assert output.table(COLUMNS, rows, wide=wide).plain.splitlines() == lines


def test_cell_has_the_style_of_its_text() -> None:
    text = output.table(COLUMNS, [Thing("bad", "", NOW)], wide=False)
    assert output.BAD in {str(span.style) for span in text.spans}


def test_document_has_the_names_of_the_fields() -> None:
    document = json.loads(output.document({"things": [Thing("a", "b", NOW)]}))
    assert document == {"things": [{"name": "a", "note": "b", "since": NOW.isoformat()}]}


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0s"), (119, "119s"), (120, "2m"), (11100, "3h5m"), (9 * 86400, "9d")],
)
def test_age_has_one_or_two_units(seconds: int, shown: str) -> None:
    assert output.age(NOW - datetime.timedelta(seconds=seconds), NOW) == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, ""), (1, "1"), (1023, "1023"), (1024, "1Ki"), (1536 * 2**20, "1.5Gi"), (5 * 2**50, "5120Ti")],
)  # fmt: skip
def test_size_has_the_unit_that_fits(count: int, shown: str) -> None:
    assert views.size(count) == shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_of_a_shell_calls_the_command_for_completions(shell: str) -> None:
    result = CliRunner().invoke(main.main, ["completion", shell])
    assert result.exit_code == 0
    assert f"_CRUST_COMPLETE={shell}_complete" in result.output


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("crust hand", "handlers"),
        ("crust volumes --sta", "--state"),
        ("crust drivers -o w", "wide"),
    ],
)
def test_completion_of_a_line_has_commands_flags_and_values(line: str, wanted: str) -> None:
    words = {"_CRUST_COMPLETE": "bash_complete", "COMP_WORDS": line}
    words["COMP_CWORD"] = str(len(line.split()) - 1)
    result = CliRunner().invoke(main.main, [], env=words, prog_name="crust")
    assert f"plain,{wanted}" in result.output.splitlines()


MOUNT_FAILED = (
    "INTERNAL",
    "RuntimeFailed",
    "the kernel could not mount",
    "who retries",
    "what to do",
)
GUARD = ("guard mount", "subPath", "runtimeClassName")


@pytest.mark.parametrize(
    ("words", "code", "shown", "not_shown"),
    [
        (["completion", "csh"], 2, ("Invalid value",), "Traceback"),
        (["explain", "MountFailed"], 0, MOUNT_FAILED, "did you mean"),
        (["explain", "mountfailed"], 0, MOUNT_FAILED, "did you mean"),
        (["explain", "[MountFailed]"], 0, MOUNT_FAILED, "did you mean"),
        (["explain", "ENOSPC"], 0, GUARD, "gRPC code"),
        (["explain", "enospc"], 0, GUARD, "gRPC code"),
        (["explain", "No space left on device"], 0, GUARD, "gRPC code"),
        (["explain", "MountFaild"], 2, ("did you mean MountFailed?",), "[MountFailed]"),
        (["explain", "qqqqqqqq"], 2, ("no error of crust is called 'qqqqqqqq'",), "did you mean"),
    ],
)
def test_command_that_asks_no_daemon_answers(
    words: list[str], code: int, shown: tuple[str, ...], not_shown: str
) -> None:
    result = CliRunner().invoke(main.main, words)
    missing = [text for text in shown if text not in result.output]
    assert (result.exit_code, missing, not_shown in result.output) == (code, [], False)


SLOW = ("pydantic", "prometheus_client", "yaml", "crust.proxy")
OF_GRPC = ("asyncio", "grpc", "google.protobuf", "rich", "ssl")
"""What takes time, and what an optional dependency may be missing for."""


@pytest.mark.parametrize(
    ("words", "slow"),
    [
        (["--help"], SLOW + OF_GRPC),
        (["completion", "bash"], SLOW + OF_GRPC),
        (["explain", "MountFailed"], SLOW + OF_GRPC),
        (["status", "--run-dir", "/nonexistent"], SLOW),
    ],
)
def test_command_imports_nothing_slow_that_it_does_not_need(
    words: list[str], slow: tuple[str, ...]
) -> None:
    program = (
        "import contextlib, sys\nfrom crust.cli.main import main\n"
        f"with contextlib.suppress(SystemExit): main({words!r}, standalone_mode=False)\n"
        f"print([name for name in {slow!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


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


async def test_archive_of_a_node_has_its_entries_and_status(root: Path, places: Places) -> None:
    async with FakeNode(places) as node, node.handler():
        await node.co.publish("vol-1", places.target("one"))
        files = bundle.NodeFiles(places.run, f"{root}/state")
        await bundle.write(root / "a.tar.gz", bundle.parts(files))
    archived = contents(root / "a.tar.gz")
    assert b'"volume_id": "vol-1"' in archived["status.json"]
    assert any(name.startswith("handoff/") for name in archived)


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


def test_table_of_errors_that_is_damaged_is_refused_by_name() -> None:
    with pytest.raises(click.ClickException, match="cannot be read: '## Damaged' is no branch"):
        list(explain.pages("## Damaged\n"))
