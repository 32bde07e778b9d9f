"""Whether a device is formatted: the only decision that can destroy a volume, as a pure function.

mkfs runs when the record says that no user ever had the device *and* the device reads as blank. Two witnesses,
because each can be wrong: a record may come from an old backup, a probe may read a failing disk. If they disagree the
stage is refused.

An interrupted mkfs leaves an incomplete filesystem and a record that says "formatting", which proves that no publish
ever happened. The device is then cleared and formatted again, unless it holds something that this mkfs cannot have
written.
"""

import enum
from collections.abc import Callable

from crust import errors
from crust.blockdriver.records.content_record import ContentRecord
from crust.host.block import signatures


class ContentInDoubt(errors.Corrupt):
    """The record and the device contradict each other."""

    def __init__(self, volume_id: str, recorded: str, found: str) -> None:
        super().__init__(
            f"{volume_id} is neither formatted nor mounted",
            why=f"its record says {recorded}, but the device holds {found}",
            hint="check the image by hand; nothing was written to it",
        )
        self.volume_id = volume_id
        self.recorded = recorded
        self.found = found


class FormattedDifferently(errors.NotReady):
    """The requested filesystem differs from the volume's."""

    def __init__(self, volume_id: str, present: str, wanted: str) -> None:
        super().__init__(
            f"{volume_id} cannot be mounted as {wanted}",
            why=f"it is formatted with {present}",
            hint=f"request {present}",
        )
        self.volume_id = volume_id
        self.present = present
        self.wanted = wanted


class NoFilesystemOnDevice(errors.NotReady):
    """A volume that was used as a raw device holds no filesystem to mount."""

    def __init__(self, volume_id: str, found: str) -> None:
        super().__init__(
            f"{volume_id} cannot be mounted",
            why=f"it was published as a raw device, and holds {found}",
            hint="make a filesystem on it as a raw volume, or create another volume",
        )
        self.volume_id = volume_id


class Action(enum.Enum):
    """What to do with a device before its first mount."""

    KEEP = "keep"
    MAKE = "make"
    CLEAR_AND_MAKE = "clear and make"


def judge(
    content: ContentRecord,
    wanted: str,
    found: signatures.Signature,
    *,
    is_blank: Callable[[], bool],
) -> Action:
    """The action after which the volume has the filesystem `wanted`.

    `is_blank` looks at every place where a superblock could be; it is asked only when the answer may be to format.
    Raises `ContentInDoubt`, `FormattedDifferently`, `NoFilesystemOnDevice`.
    """
    if content.state == "new":
        if isinstance(found, signatures.Blank) and is_blank():
            return Action.MAKE
        raise ContentInDoubt(content.volume_id, "that it was never used", describe(found))
    if content.state == "formatting":
        return _judge_interrupted(content, found)
    if not isinstance(found, signatures.Filesystem):
        if content.state == "raw":
            raise NoFilesystemOnDevice(content.volume_id, describe(found))
        raise ContentInDoubt(content.volume_id, f"{content.fs_type} was made", describe(found))
    if content.state == "formatted" and found.type != content.fs_type:
        raise ContentInDoubt(content.volume_id, f"{content.fs_type} was made", describe(found))
    if found.type != wanted:
        raise FormattedDifferently(content.volume_id, found.type, wanted)
    return Action.KEEP


def _judge_interrupted(content: ContentRecord, found: signatures.Signature) -> Action:
    own = isinstance(found, signatures.Filesystem) and found.type == content.fs_type
    if own or isinstance(found, signatures.Blank):
        return Action.CLEAR_AND_MAKE
    recorded = f"that making {content.fs_type} was interrupted"
    raise ContentInDoubt(content.volume_id, recorded, describe(found))


def describe(found: signatures.Signature) -> str:
    """The content, for messages."""
    if isinstance(found, signatures.Filesystem):
        return found.type
    if isinstance(found, signatures.Other):
        return found.what
    return "no signature"
