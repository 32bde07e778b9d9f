"""The format decision for every record and every device content."""

import itertools

import pytest

from crust import errors
from crust.blockdriver.node import format_decision
from crust.blockdriver.node.format_decision import Action
from crust.blockdriver.records.content_record import ContentRecord, ContentState
from crust.host.block import signatures

EXT4 = signatures.Filesystem("ext4", "")
XFS = signatures.Filesystem("xfs", "")
BLANK = signatures.Blank()
TABLE = signatures.Other("partition table gpt")
FOUND: tuple[signatures.Signature, ...] = (EXT4, XFS, BLANK, TABLE)
CONTENTS: tuple[ContentState, ...] = ("new", "formatting", "formatted", "raw")


def known(state: ContentState) -> ContentRecord:
    fs_type = "ext4" if state in ("formatting", "formatted") else ""
    return ContentRecord(volume_id="vol-1", state=state, fs_type=fs_type)


def judge(
    state: ContentState, found: signatures.Signature, *, wanted: str = "ext4", zeros: bool = True
) -> Action | type[Exception]:
    try:
        return format_decision.judge(known(state), wanted, found, is_blank=lambda: zeros)
    except errors.CrustError as error:
        return type(error)


def test_decide_formats_only_a_new_volume_that_reads_as_zeros() -> None:
    formatting = [
        (content, found, zeros)
        for content, found, zeros in itertools.product(CONTENTS, FOUND, (True, False))
        if judge(content, found, zeros=zeros) is Action.MAKE
    ]
    assert formatting == [("new", BLANK, True)]


def test_decide_clears_only_after_an_interrupted_mkfs() -> None:
    cleared = [
        (content, found)
        for content, found in itertools.product(CONTENTS, FOUND)
        if judge(content, found) is Action.CLEAR_AND_MAKE
    ]
    assert cleared == [("formatting", EXT4), ("formatting", BLANK)]


@pytest.mark.parametrize(
    ("state", "found", "expected"),
    [
        ("formatted", EXT4, Action.KEEP),
        ("formatted", XFS, format_decision.ContentInDoubt),
        ("formatted", BLANK, format_decision.ContentInDoubt),
        ("formatted", TABLE, format_decision.ContentInDoubt),
        ("raw", EXT4, Action.KEEP),
        ("raw", XFS, format_decision.FormattedDifferently),
        ("raw", BLANK, format_decision.NoFilesystemOnDevice),
        ("raw", TABLE, format_decision.NoFilesystemOnDevice),
        ("new", EXT4, format_decision.ContentInDoubt),
        ("formatting", XFS, format_decision.ContentInDoubt),
    ],
)
def test_decide_with_content_on_the_device_keeps_it_or_raises(
    state: ContentState, found: signatures.Signature, expected: Action | type[Exception]
) -> None:
    assert judge(state, found) is expected


def test_decide_another_filesystem_than_recorded_is_refused() -> None:
    assert judge("formatted", EXT4, wanted="xfs") is format_decision.FormattedDifferently
