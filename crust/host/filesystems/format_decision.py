"""Whether a device is formatted: the only decision that can destroy a volume, as a pure function.

mkfs runs when the record says that no user ever had the device *and* the device is blank: it reads so, or its engine
stores no data of it at all. Two sources, because each can be wrong: a record may come from an old backup, a probe
may read a failing disk. If they disagree the stage is refused.

After an interrupted mkfs the record says "formatting". That is one source, and the record may be an old one, of a
volume that has been in use since. The other is the device: mkfs.ext4 and mkfs.btrfs write the superblock last, and
mkfs.xfs marks its own until it ends. Without a complete filesystem the device is cleared and formatted again. A
complete one with the UUID that the record planned is kept. Anything else is in doubt: nothing that is a complete
filesystem is ever cleared.

A volume that guests had may have a filesystem of theirs while its record still says "new": that is kept, too.
"""

import enum
from collections.abc import Callable
from typing import Protocol

from crust.core import errors
from crust.host.block import signatures
from crust.host.filesystems import superblocks


class Content(Protocol):
    """What a driver has recorded of a volume's content: the first source."""

    @property
    def volume_id(self) -> str:
        """The volume, for messages."""

    @property
    def state(self) -> str:
        """ "new", "formatting", "formatted" or "raw"."""

    @property
    def fs_type(self) -> str:
        """The filesystem that was made, or is being made; empty otherwise."""

    @property
    def planned_uuid(self) -> str:
        """The UUID of the filesystem that is being made; empty otherwise."""

    @property
    def in_guest(self) -> bool:
        """Whether a guest could ever write the content."""


class ContentInDoubt(errors.Corrupt):
    """The record and the device contradict each other."""

    def __init__(self, volume_id: str, recorded: str, found: str) -> None:
        super().__init__(
            f"{volume_id} is neither formatted nor mounted",
            why=f"its record says {recorded}, but the device holds {found}",
            hint="check the image by hand; nothing was written to it",
        )


class Action(enum.Enum):
    """What to do with a device before its first mount."""

    KEEP = "keep"
    MAKE = "make"
    CLEAR_AND_MAKE = "clear and make"
    ADOPT = "adopt"
    """mkfs had ended when the driver was killed: check what it made, and keep it."""


def judge(
    content: Content,
    wanted: str,
    found: signatures.Signature,
    *,
    is_blank: Callable[[], bool],
    left: Callable[[str], superblocks.Superblock],
) -> Action:
    """The action after which the volume has the filesystem `wanted`.

    `is_blank` looks at every place where a superblock could be; it is asked only when the answer may be to format.
    `left` reads the superblock of the type that was found: an interrupted mkfs may have left it.
    Raises `ContentInDoubt`, `FormattedDifferently`, `NoFilesystemOnDevice`.
    """
    if content.state == "new":
        return _judge_new(content, wanted, found, is_blank, left)
    if content.state == "formatting":
        action = judge_interrupted(content, found, left=left)
        if action is Action.ADOPT:
            _check_wanted(content, content.fs_type, wanted)
        return action
    if not isinstance(found, signatures.Filesystem):
        if content.state == "raw":
            raise errors.NotReady.named(
                "NoFilesystemOnDevice",
                f"{content.volume_id} cannot be mounted",
                why=f"it was published as a raw device, and holds {describe(found)}",
                hint="make a filesystem on it as a raw volume, or create another volume",
            )
        raise ContentInDoubt(content.volume_id, f"{content.fs_type} was made", describe(found))
    if content.state == "formatted" and found.type != content.fs_type:
        raise ContentInDoubt(content.volume_id, f"{content.fs_type} was made", describe(found))
    _check_wanted(content, found.type, wanted)
    return Action.KEEP


def _judge_new(
    content: Content,
    wanted: str,
    found: signatures.Signature,
    is_blank: Callable[[], bool],
    left: Callable[[str], superblocks.Superblock],
) -> Action:
    if isinstance(found, signatures.Blank) and is_blank():
        return Action.MAKE
    what = "data without a signature" if isinstance(found, signatures.Blank) else describe(found)
    if content.in_guest and isinstance(found, signatures.Filesystem):
        _check_wanted(content, found.type, wanted)  # somebody else has made it
        if left(found.type).complete:
            return Action.KEEP
        what = f"{found.type} whose mkfs was interrupted"
    raise ContentInDoubt(content.volume_id, "that it was never used", what)


def _check_wanted(content: Content, present: str, wanted: str) -> None:
    if present != wanted:
        raise errors.NotReady.named(
            "FormattedDifferently",
            f"{content.volume_id} cannot be mounted as {wanted}",
            why=f"it is formatted with {present}",
            hint=f"request {present}",
        )


def judge_interrupted(
    content: Content,
    found: signatures.Signature,
    *,
    left: Callable[[str], superblocks.Superblock],
) -> Action:
    """CLEAR_AND_MAKE or ADOPT for a volume whose record says "formatting". Raises `ContentInDoubt`."""
    if isinstance(found, signatures.Blank):
        return Action.CLEAR_AND_MAKE
    if isinstance(found, signatures.Filesystem) and found.type == content.fs_type:
        superblock = left(found.type)
        if not superblock.complete:
            return Action.CLEAR_AND_MAKE
        if content.planned_uuid and superblock.uuid == content.planned_uuid:
            return Action.ADOPT
        what = f"a complete {found.type} with the UUID {superblock.uuid}"
    else:
        what = describe(found)
    planned = f"{content.fs_type} {content.planned_uuid}".strip()
    raise ContentInDoubt(content.volume_id, f"that making {planned} was interrupted", what)


def check_readable(volume_id: str, action: Action | None) -> None:
    """Raise ReadOnlyVolumeNotFormatted unless a volume that is to be read only can be mounted as it is."""
    if action not in (None, Action.KEEP):
        raise errors.NotReady.named(
            "ReadOnlyVolumeNotFormatted",
            f"{volume_id} cannot be mounted",
            why=(
                "it has no filesystem, or none that was made completely, and it is to be read only"
            ),
            hint="publish it for writing first, or create it from a snapshot",
        )


def describe(found: signatures.Signature) -> str:
    """The content, for messages."""
    if isinstance(found, signatures.Filesystem):
        return found.type
    if isinstance(found, signatures.Other):
        return found.what
    return "no signature"
