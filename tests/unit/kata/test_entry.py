"""Kata's entry, to the byte: names and contents from the real runtimes, and what is never touched."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from crust.core import errors, volumes
from crust.kata import entry
from crust.kata.entry import Kind
from tests.support.faults import lies
from tests.support.raised import raised
from tests.support.records.records import TARGET, a_record

NAME = entry.name_of(TARGET.text)


@pytest.fixture
def entries(tmp_path: Path) -> entry.KataEntries:
    made = entry.KataEntries(f"{tmp_path}/shared/direct-volumes")
    made.open()
    return made


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("../../etc/passwd", "Li4vLi4vZXRjL3Bhc3N3ZA=="),  # Kata's own vectors
        ("abcdddd", "YWJjZGRkZA=="),
        ("/data", "L2RhdGE="),
        ("/data/", "L2RhdGEv"),
    ],
)
def test_a_name_is_base64url_of_the_source_as_it_came(key: str, name: str) -> None:
    assert entry.name_of(key) == name


def test_path_too_long_in_base64_is_refused_by_its_length() -> None:
    assert len(entry.name_of("/" + "x" * 188)) == 252
    with raised("KataPathTooLong", match="190 bytes"):
        entry.name_of("/" + "x" * 189)


def test_the_real_entry_has_what_both_runtimes_read() -> None:
    record = a_record()
    assert entry.real(record) == (
        b'{"volume-type":"directvol","device":"/dev/loop7","fstype":"ext4",'
        b'"metadata":{"fsGroup":"3000","fsGroupChangePolicy":"OnRootMismatch"},"options":["noatime"]}'
    )


def test_a_read_only_volume_has_ro_and_never_a_group() -> None:
    plain = json.loads(entry.real(a_record(readonly=True)))
    assert plain["options"] == ["ro", "noatime"]
    assert plain["metadata"] == {}


def test_the_placeholder_names_no_device_that_exists() -> None:
    plain = json.loads(entry.placeholder(a_record()))
    assert plain["device"].endswith(TARGET.digest)
    assert not os.path.lexists(plain["device"])
    assert set(plain) == {"volume-type", "device", "fstype", "metadata", "options"}


def test_an_entry_appears_whole_and_holds_nothing_else(entries: entry.KataEntries) -> None:
    record = a_record()
    assert entries.place(NAME, record) is Kind.ABSENT
    assert entries.place(NAME, record) is Kind.PLACEHOLDER
    assert os.listdir(f"{entries.root}/{NAME}") == ["mountInfo.json"]
    assert os.stat(entries.file(NAME)).st_mode & 0o777 == 0o600
    assert os.stat(f"{entries.root}/{NAME}").st_mode & 0o777 == 0o700
    assert list(entries.ours()) == [(NAME, TARGET.digest)]


def test_the_real_one_is_renamed_over_it_and_back(entries: entry.KataEntries) -> None:
    record = a_record()
    entries.place(NAME, record)
    new, back = entries.staged(NAME, record)
    os.rename(new, entries.file(NAME))
    assert entries.kind(NAME, record) is Kind.REAL
    assert list(entries.ours()) == [(NAME, TARGET.digest)]
    assert entries.kind(NAME, a_record(group=volumes.GroupChange(7))) is Kind.REAL
    os.rename(back, entries.file(NAME))
    assert entries.kind(NAME, record) is Kind.PLACEHOLDER


@pytest.mark.parametrize(
    "content",
    [
        b'{"volume-type":"blk","device":"/e/disk.img","fstype":"ext4","metadata":{},"options":[]}',
        b'{"volume-type":"directvol","device":"/dev/sdz","fstype":"ext4","metadata":{},"options":["noatime"]}',
        b'{"device":"/dev/crust-no-device-until-claimed/' + b"0" * 64 + b'"}',
        b"{",
        b"[]",
        b"[" * 100_000,
    ],
)
def test_an_entry_of_somebody_else_is_refused_and_never_changed(
    entries: entry.KataEntries, content: bytes
) -> None:
    directory = Path(entries.root) / NAME
    directory.mkdir()
    (directory / "mountInfo.json").write_bytes(content)
    (directory / "mountInfo.json").chmod(0o600)
    with raised("KataEntryForeign", match=NAME):
        entries.place(NAME, a_record())
    assert (directory / "mountInfo.json").read_bytes() == content
    assert list(entries.ours()) == []


def test_directory_with_katas_id_alone_is_foreign_unlike_empty_one(
    entries: entry.KataEntries,
) -> None:
    directory = Path(entries.root) / NAME
    directory.mkdir()
    (directory / "sandbox").touch()
    assert entries.kind(NAME, a_record()) is Kind.FOREIGN
    (directory / "sandbox").unlink()
    assert entries.place(NAME, a_record()) is Kind.ABSENT
    assert entries.kind(NAME, a_record()) is Kind.PLACEHOLDER


def test_entry_goes_with_ids_that_kata_left_in_it(entries: entry.KataEntries) -> None:
    record = a_record()
    entries.place(NAME, record)
    entries.staged(NAME, record)
    Path(f"{entries.root}/{NAME}/{'a' * 64}").touch()
    entries.remove(NAME)
    assert os.listdir(entries.root) == os.listdir(f"{entries.root}.crust") == []


def test_real_entry_that_is_not_seen_is_never_foreign(entries: entry.KataEntries) -> None:
    """Else it would name the device after its claim has ended."""
    record = a_record()
    entries.place(NAME, record)
    os.rename(entries.staged(NAME, record)[0], entries.file(NAME))
    looks: tuple[Callable[[], object], ...] = (
        lambda: entries.kind(NAME, record),
        lambda: list(entries.real_ones(lambda: [record])),
        lambda: list(entries.ours()),
    )
    concerns = lies.Concerns(frozenset(), (entries.root, f"{entries.root}.crust"))
    for look in looks:
        truth = look()
        asked = list(lies.failures(look, concerns, errnos_of=lies.all_errnos))
        assert asked
        for each in asked:
            assert isinstance(each.error, errors.CrustError) or each.value == truth, each.failure


def test_no_volume_is_read_while_all_entries_are_placeholders(
    entries: entry.KataEntries,
) -> None:
    entries.place(NAME, a_record())
    assert not list(entries.real_ones(lambda: pytest.fail("all volumes of the node are read")))


def test_entries_of_others_end_no_look(entries: entry.KataEntries) -> None:
    record = a_record()
    entries.place(NAME, record)
    os.rename(entries.staged(NAME, record)[0], entries.file(NAME))
    for name in ("link", "directory"):
        (Path(entries.root) / name).mkdir()
    (Path(entries.root) / "link/mountInfo.json").symlink_to(entries.file(NAME))
    (Path(entries.root) / "directory/mountInfo.json").mkdir()
    (Path(entries.root) / "file").touch()
    assert list(entries.real_ones(lambda: [record])) == [(NAME, record)]
    for name in ("link", "directory", "file"):
        assert entries.kind(name, record) is Kind.FOREIGN
