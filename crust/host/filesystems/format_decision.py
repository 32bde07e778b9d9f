"""Whether a device is formatted: the only decision that can destroy a volume, as a pure function.

mkfs runs when the record says that no user ever had the device *and* the device is blank: it reads so, or its engine
stores no data of it at all. Two sources, because each can be wrong: a record may come from an old backup, a probe
may read a failing disk. If they disagree, the driver refuses the stage.

After an interrupted mkfs the record says "formatting". That is one source, and the record may be an old one, of a
volume that has been in use since. The other is the device: mkfs.ext4 and mkfs.btrfs write the superblock last, and
mkfs.xfs marks its own until it ends. The driver clears and formats the device again if it has no complete filesystem,
and keeps a complete one with the UUID that the record planned. Any other complete filesystem is in doubt, and never
cleared. The superblock is read here too, also where libblkid knows none: its read may have failed for a moment.

A guest may have made a filesystem while the record still says "new": the driver keeps that, too.

A file of a user may look like another format to libblkid, as a disk image does (util-linux #4031). That forbids mkfs,
and no mount: the wanted filesystem is kept if its own superblock is complete. A volume that a pod had as a raw device
is refused for anything else that libblkid is sure of: the pod may have made the member of a RAID of it.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from crust.core import errors
from crust.host.block import signatures
from crust.host.filesystems import superblocks


@dataclass(frozen=True, slots=True)
class Content:
    """What is recorded of a volume's content: the first source."""

    volume_id: str
    """The volume, for messages."""
    state: str = "new"
    """ "new", "formatting", "formatted" or "raw"."""
    fs_type: str = ""
    """The filesystem that was made, or is being made; empty otherwise."""
    planned_uuid: str = ""
    """The UUID of the filesystem that is being made; empty otherwise."""
    in_guest: bool = False
    """Whether a guest could ever write the content."""


class ContentInDoubt(errors.Corrupt):
    def __init__(self, volume_id: str, recorded: str, holds: str) -> None:
        super().__init__(
            f"{volume_id} is neither formatted nor mounted",
            why=f"its record says {recorded}, but the device holds {holds}",
        )


class Action(enum.Enum):
    """The work on a device before its first mount."""

    KEEP = "keep"
    MAKE = "make"
    CLEAR_AND_MAKE = "clear and make"
    ADOPT = "adopt"
    """mkfs had ended when the driver was killed: check the new filesystem, and keep it."""


def judge(
    content: Content,
    fs_type: str,
    signature: signatures.Signature,
    *,
    superblock_of: Callable[[str], superblocks.Superblock | None],
) -> Action:
    """The action after which the volume has the filesystem `fs_type`.

    `superblock_of` reads the superblock of a type (`superblocks.find`): an interrupted mkfs may have left one.
    Raises `ContentInDoubt`, `FormattedDifferently`, `NoFilesystemOnDevice`.
    """
    if content.state == "new":
        return _judge_new(content, fs_type, signature, superblock_of)
    if content.state == "formatting":
        action = judge_interrupted(content, signature, superblock_of=superblock_of)
        if action is Action.ADOPT:
            _check_wanted(content, content.fs_type, fs_type)
        return action
    found, holds = "", signatures.describe(signature)
    if isinstance(signature, signatures.Filesystem):
        found = signature.type
    elif content.state == "raw":
        if isinstance(signature, signatures.Ambiguous):
            superblock = superblock_of(fs_type)
            if superblock is not None and superblock.complete:
                return Action.KEEP
        raise errors.NotReady.named(
            "NoFilesystemOnDevice",
            f"{content.volume_id} cannot be mounted",
            why=f"it was published as a raw device, and holds {holds}",
        )
    if not found or (content.state == "formatted" and found != content.fs_type):
        raise ContentInDoubt(content.volume_id, f"{content.fs_type} was made", holds)
    _check_wanted(content, found, fs_type)
    return Action.KEEP


def _judge_new(
    content: Content,
    fs_type: str,
    signature: signatures.Signature,
    superblock_of: Callable[[str], superblocks.Superblock | None],
) -> Action:
    if isinstance(signature, signatures.Blank):
        return Action.MAKE
    holds = signatures.describe(signature)
    if content.in_guest and not isinstance(signature, signatures.Unsigned):
        if isinstance(signature, signatures.Filesystem):
            _check_wanted(content, signature.type, fs_type)  # somebody else has made it
            holds = f"{signature.type} whose mkfs was interrupted"
        superblock = superblock_of(fs_type)
        if superblock is not None and superblock.complete:
            return Action.KEEP
    raise ContentInDoubt(content.volume_id, "that it was never used", holds)


def _check_wanted(content: Content, present: str, fs_type: str) -> None:
    if present != fs_type:
        raise errors.NotReady.named(
            "FormattedDifferently",
            f"{content.volume_id} cannot be mounted as {fs_type}",
            why=f"it is formatted with {present}",
            hint=f"request {present}",
        )


def judge_interrupted(
    content: Content,
    signature: signatures.Signature,
    *,
    superblock_of: Callable[[str], superblocks.Superblock | None],
) -> Action:
    """CLEAR_AND_MAKE or ADOPT for a volume whose record says "formatting". Raises `ContentInDoubt`."""
    if isinstance(signature, signatures.Blank):
        return Action.CLEAR_AND_MAKE
    holds = signatures.describe(signature)
    unsigned = isinstance(signature, signatures.Unsigned)
    is_ambiguous = isinstance(signature, signatures.Ambiguous)
    found = signature.type if isinstance(signature, signatures.Filesystem) else ""
    if unsigned or is_ambiguous or found == content.fs_type:
        superblock = superblock_of(content.fs_type)
        is_left = unsigned if superblock is None else not superblock.complete
        if is_left and not is_ambiguous:
            return Action.CLEAR_AND_MAKE
        if superblock is not None and superblock.complete:
            if content.planned_uuid and superblock.uuid == content.planned_uuid:
                return Action.ADOPT
            holds = f"a complete {content.fs_type} with the UUID {superblock.uuid}"
    planned = f"{content.fs_type} {content.planned_uuid}".strip()
    raise ContentInDoubt(content.volume_id, f"that making {planned} was interrupted", holds)


def check_readable(volume_id: str, action: Action | None) -> None:
    """Raise ReadOnlyVolumeNotFormatted unless a volume can be mounted for reading without any work."""
    if action not in (None, Action.KEEP):
        raise errors.NotReady.named(
            "ReadOnlyVolumeNotFormatted",
            f"{volume_id} cannot be mounted",
            why="it has no filesystem, or only a part of one, and it is published read-only",
        )
