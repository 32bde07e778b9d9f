"""The format decision for every record and device content."""

import pytest

from crust.blockdriver.records.models import ContentState
from crust.core import errors
from crust.host.block import signatures
from crust.host.filesystems import format_decision, superblocks
from crust.host.filesystems.format_decision import Action

EXT4 = signatures.Filesystem("ext4", "")


SIGNATURES: tuple[signatures.Signature, ...] = (
    EXT4,
    signatures.Filesystem("xfs", ""),
    signatures.Blank(),
    signatures.Unsigned(),
    signatures.Other("partition table gpt"),
    signatures.Ambiguous(),
)


PLANNED, ANOTHER = (f"{digit}" * 8 + "-0000-4000-8000-000000000000" for digit in "12")


INCOMPLETE = superblocks.Superblock(4096, 10, clean=True, uuid=PLANNED, complete=False)


CLEAR = Action.CLEAR_AND_MAKE


DOUBT, DIFFERENT, NONE = "ContentInDoubt", "FormattedDifferently", "NoFilesystemOnDevice"


def complete(uuid: str) -> superblocks.Superblock:
    return superblocks.Superblock(4096, 10, clean=True, uuid=uuid)


def judge(
    state: ContentState,
    signature: signatures.Signature,
    *,
    wanted: str = "ext4",
    left: superblocks.Superblock | None = INCOMPLETE,
    planned_uuid: str = PLANNED,
    in_guest: bool = False,
) -> Action | str:
    content = format_decision.Content(
        "vol-1",
        state=state,
        fs_type="ext4" if state in ("formatting", "formatted") else "",
        planned_uuid=planned_uuid if state == "formatting" else "",
        in_guest=in_guest,
    )
    try:
        return format_decision.judge(content, wanted, signature, superblock_of=lambda _: left)
    except errors.CrustError as error:
        return error.error_name


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("new", [DOUBT, DOUBT, Action.MAKE, DOUBT, DOUBT, DOUBT]),
        ("formatting", [CLEAR, DOUBT, CLEAR, CLEAR, DOUBT, DOUBT]),
        ("formatted", [Action.KEEP, DOUBT, DOUBT, DOUBT, DOUBT, DOUBT]),
        ("raw", [Action.KEEP, DIFFERENT, NONE, NONE, NONE, NONE]),
    ],
)
def test_decide_formats_only_zeroed_new_volume_or_interrupted_mkfs(
    state: ContentState, expected: list[Action | str]
) -> None:
    assert [judge(state, signature) for signature in SIGNATURES] == expected


def test_decide_keeps_filesystem_of_guest_and_formats_only_blank_volume() -> None:
    """Of a volume that guests had and this driver has never formatted. What is not finished is not cleared either."""
    decided = [
        judge("new", signature, in_guest=True, left=complete(ANOTHER)) for signature in SIGNATURES
    ]
    assert decided == [Action.KEEP, DIFFERENT, Action.MAKE, DOUBT, Action.KEEP, Action.KEEP]
    for left in (INCOMPLETE, None):
        for signature in (EXT4, signatures.Other("raid linux_raid_member"), signatures.Ambiguous()):
            assert judge("new", signature, in_guest=True, left=left) == DOUBT


def test_decide_keeps_complete_filesystem_beside_a_users_other_signature() -> None:
    """A file of a user looked like another format, and the volume was refused for ever (util-linux #4031)."""
    assert judge("raw", signatures.Ambiguous(), left=complete(ANOTHER)) == Action.KEEP
    assert judge("raw", signatures.Ambiguous(), left=None) == NONE
    member = signatures.Other("raid linux_raid_member")  # the pod may have made it
    assert judge("raw", member, left=complete(ANOTHER)) == NONE
    assert judge("formatting", signatures.Ambiguous(), left=complete(PLANNED)) == Action.ADOPT
    assert judge("formatting", signatures.Ambiguous(), left=INCOMPLETE) == DOUBT


@pytest.mark.parametrize(
    ("left", "planned_uuid", "expected"),
    [
        (complete(PLANNED), PLANNED, Action.ADOPT),
        (complete(ANOTHER), PLANNED, DOUBT),
        (complete(PLANNED), "", DOUBT),
        (INCOMPLETE, PLANNED, CLEAR),
    ],
    ids=["planned", "another", "without a plan", "incomplete"],
)
@pytest.mark.parametrize("seen", [EXT4, signatures.Unsigned()])
def test_decide_after_an_interrupted_mkfs_never_clears_a_complete_filesystem(
    left: superblocks.Superblock,
    planned_uuid: str,
    expected: Action | str,
    seen: signatures.Signature,
) -> None:
    """Also where libblkid saw no signature: it says the same after a read error that has passed."""
    assert judge("formatting", seen, left=left, planned_uuid=planned_uuid) == expected


def test_decide_clears_unsigned_data_only_without_a_superblock() -> None:
    assert judge("formatting", signatures.Unsigned(), left=None) == CLEAR
    assert judge("formatting", EXT4, left=None) == DOUBT


def test_decide_another_filesystem_than_recorded_is_refused() -> None:
    assert judge("formatted", EXT4, wanted="xfs") == DIFFERENT
    assert judge("formatting", EXT4, wanted="xfs", left=complete(PLANNED)) == DIFFERENT
