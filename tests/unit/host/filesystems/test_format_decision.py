"""The format decision for every record and every device content."""

import pytest

from crust.blockdriver.records.models import ContentRecord, ContentState
from crust.core import errors
from crust.host.block import signatures
from crust.host.filesystems import format_decision, superblocks
from crust.host.filesystems.format_decision import Action

EXT4 = signatures.Filesystem("ext4", "")
FOUND: tuple[signatures.Signature, ...] = (
    EXT4,
    signatures.Filesystem("xfs", ""),
    signatures.Blank(),
    signatures.Other("partition table gpt"),
)
PLANNED, ANOTHER = (f"{digit}" * 8 + "-0000-4000-8000-000000000000" for digit in "12")
INCOMPLETE = superblocks.Superblock(4096, 10, clean=True, uuid=PLANNED, complete=False)
DOUBT, DIFFERENT, NONE = "ContentInDoubt", "FormattedDifferently", "NoFilesystemOnDevice"


def complete(uuid: str) -> superblocks.Superblock:
    return superblocks.Superblock(4096, 10, clean=True, uuid=uuid)


def judge(
    state: ContentState,
    found: signatures.Signature,
    *,
    wanted: str = "ext4",
    zeros: bool = True,
    left: superblocks.Superblock = INCOMPLETE,
    planned_uuid: str = PLANNED,
    in_guest: bool = False,
) -> Action | str:
    content = ContentRecord(
        volume_id="vol-1",
        state=state,
        fs_type="ext4" if state in ("formatting", "formatted") else "",
        planned_uuid=planned_uuid if state == "formatting" else "",
        in_guest=in_guest,
    )
    try:
        return format_decision.judge(
            content, wanted, found, is_blank=lambda: zeros, left=lambda _: left
        )
    except errors.CrustError as error:
        return error.error_name


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("new", [DOUBT, DOUBT, Action.MAKE, DOUBT]),
        ("formatting", [Action.CLEAR_AND_MAKE, DOUBT, Action.CLEAR_AND_MAKE, DOUBT]),
        ("formatted", [Action.KEEP, DOUBT, DOUBT, DOUBT]),
        ("raw", [Action.KEEP, DIFFERENT, NONE, NONE]),
    ],
)
def test_decide_formats_only_a_new_volume_that_reads_as_zeros_or_an_interrupted_mkfs(
    state: ContentState, expected: list[Action | str]
) -> None:
    assert [judge(state, found) for found in FOUND] == expected
    unread = [DOUBT if each is Action.MAKE else each for each in expected]
    assert [judge(state, found, zeros=False) for found in FOUND] == unread


def test_decide_what_a_guest_has_made_is_kept_and_only_a_blank_volume_is_formatted() -> None:
    """Of a volume that guests had and this driver has never formatted. What is not finished is not cleared either."""
    for zeros, blank in ((True, Action.MAKE), (False, DOUBT)):
        decided = [
            judge("new", found, in_guest=True, left=complete(ANOTHER), zeros=zeros)
            for found in FOUND
        ]
        assert decided == [Action.KEEP, DIFFERENT, blank, DOUBT]
    assert judge("new", EXT4, in_guest=True) == DOUBT


@pytest.mark.parametrize(
    ("left", "planned_uuid", "expected"),
    [
        (complete(PLANNED), PLANNED, Action.ADOPT),
        (complete(ANOTHER), PLANNED, DOUBT),
        (complete(PLANNED), "", DOUBT),
        (INCOMPLETE, PLANNED, Action.CLEAR_AND_MAKE),
    ],
    ids=["planned", "another", "without a plan", "incomplete"],
)
def test_decide_after_an_interrupted_mkfs_never_clears_a_complete_filesystem(
    left: superblocks.Superblock, planned_uuid: str, expected: Action | str
) -> None:
    assert judge("formatting", EXT4, left=left, planned_uuid=planned_uuid) == expected


def test_decide_another_filesystem_than_recorded_is_refused() -> None:
    assert judge("formatted", EXT4, wanted="xfs") == DIFFERENT
    assert judge("formatting", EXT4, wanted="xfs", left=complete(PLANNED)) == DIFFERENT
