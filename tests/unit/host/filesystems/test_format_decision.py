"""The format decision for every record and every device content."""

import itertools

import pytest

from crust.blockdriver.records.models import ContentRecord, ContentState
from crust.core import errors
from crust.host.block import signatures
from crust.host.filesystems import format_decision, superblocks
from crust.host.filesystems.format_decision import Action

EXT4 = signatures.Filesystem("ext4", "")
XFS = signatures.Filesystem("xfs", "")
BLANK = signatures.Blank()
TABLE = signatures.Other("partition table gpt")
FOUND: tuple[signatures.Signature, ...] = (EXT4, XFS, BLANK, TABLE)
CONTENTS: tuple[ContentState, ...] = ("new", "formatting", "formatted", "raw")


PLANNED, ANOTHER = (f"{digit}" * 8 + "-0000-4000-8000-000000000000" for digit in "12")
INCOMPLETE = superblocks.Superblock(4096, 10, clean=True, uuid=PLANNED, complete=False)


def complete(uuid: str) -> superblocks.Superblock:
    return superblocks.Superblock(4096, 10, clean=True, uuid=uuid)


def known(state: ContentState, planned_uuid: str = PLANNED) -> ContentRecord:
    fs_type = "ext4" if state in ("formatting", "formatted") else ""
    uuid = planned_uuid if state == "formatting" else ""
    return ContentRecord(volume_id="vol-1", state=state, fs_type=fs_type, planned_uuid=uuid)


def judge(
    state: ContentState,
    found: signatures.Signature,
    *,
    wanted: str = "ext4",
    zeros: bool = True,
    left: superblocks.Superblock = INCOMPLETE,
    planned_uuid: str = PLANNED,
) -> Action | str:
    try:
        return format_decision.judge(
            known(state, planned_uuid), wanted, found, is_blank=lambda: zeros, left=lambda _: left
        )
    except errors.CrustError as error:
        return error.error_name


def test_decide_formats_only_a_new_volume_that_reads_as_zeros() -> None:
    formatting = [
        (content, found, zeros)
        for content, found, zeros in itertools.product(CONTENTS, FOUND, (True, False))
        if judge(content, found, zeros=zeros) is Action.MAKE
    ]
    assert formatting == [("new", BLANK, True)]


def of_guests(
    found: signatures.Signature,
    *,
    zeros: bool = True,
    left: superblocks.Superblock | None = None,
) -> Action | str:
    """Of a volume that guests had and this driver has never formatted."""
    content = known("new").but(in_guest=True)
    try:
        return format_decision.judge(
            content, "ext4", found, is_blank=lambda: zeros, left=lambda _: left or complete(ANOTHER)
        )
    except errors.CrustError as error:
        return error.error_name


def test_decide_what_a_guest_has_made_is_kept_and_only_a_blank_volume_is_formatted() -> None:
    decided = [of_guests(found, zeros=zeros) for found in FOUND for zeros in (True, False)]
    kept, different = Action.KEEP, "FormattedDifferently"
    doubt = "ContentInDoubt"
    assert decided == [kept, kept, different, different, Action.MAKE, doubt, doubt, doubt]


def test_decide_what_a_guest_has_not_finished_is_neither_kept_nor_cleared() -> None:
    assert of_guests(EXT4, left=INCOMPLETE) == "ContentInDoubt"


def test_decide_clears_only_after_an_interrupted_mkfs() -> None:
    cleared = [
        (content, found)
        for content, found in itertools.product(CONTENTS, FOUND)
        if judge(content, found) is Action.CLEAR_AND_MAKE
    ]
    assert cleared == [("formatting", EXT4), ("formatting", BLANK)]


@pytest.mark.parametrize(
    ("left", "planned_uuid", "expected"),
    [
        (complete(PLANNED), PLANNED, Action.ADOPT),
        (complete(ANOTHER), PLANNED, "ContentInDoubt"),
        (complete(PLANNED), "", "ContentInDoubt"),
        (INCOMPLETE, PLANNED, Action.CLEAR_AND_MAKE),
    ],
    ids=["planned", "another", "planned by an earlier version", "incomplete"],
)
def test_decide_after_an_interrupted_mkfs_never_clears_a_complete_filesystem(
    left: superblocks.Superblock, planned_uuid: str, expected: Action | str
) -> None:
    assert judge("formatting", EXT4, left=left, planned_uuid=planned_uuid) == expected


def test_decide_complete_filesystem_when_another_is_wanted_is_refused() -> None:
    refused = judge("formatting", EXT4, wanted="xfs", left=complete(PLANNED))
    assert refused == "FormattedDifferently"


@pytest.mark.parametrize(
    ("state", "found", "expected"),
    [
        ("formatted", EXT4, Action.KEEP),
        ("formatted", XFS, "ContentInDoubt"),
        ("formatted", BLANK, "ContentInDoubt"),
        ("formatted", TABLE, "ContentInDoubt"),
        ("raw", EXT4, Action.KEEP),
        ("raw", XFS, "FormattedDifferently"),
        ("raw", BLANK, "NoFilesystemOnDevice"),
        ("raw", TABLE, "NoFilesystemOnDevice"),
        ("new", EXT4, "ContentInDoubt"),
        ("formatting", XFS, "ContentInDoubt"),
    ],
)
def test_decide_with_content_on_the_device_keeps_it_or_raises(
    state: ContentState, found: signatures.Signature, expected: Action | str
) -> None:
    assert judge(state, found) == expected


def test_decide_another_filesystem_than_recorded_is_refused() -> None:
    assert judge("formatted", EXT4, wanted="xfs") == "FormattedDifferently"
